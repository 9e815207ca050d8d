"""Model, loss and data in; derivatives, trials and advice out."""
