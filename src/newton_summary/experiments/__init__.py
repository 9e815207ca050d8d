"""The paper's experiments, and some of our own."""
