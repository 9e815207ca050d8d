"""Results as text, in a terminal and in a notebook."""
