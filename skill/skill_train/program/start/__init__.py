"""The start of the training: what it is given."""
