"""The start of the training: what it is given, and how it says why it failed."""
