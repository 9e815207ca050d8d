"""The loss of a model on some data, evaluated without a trace."""
