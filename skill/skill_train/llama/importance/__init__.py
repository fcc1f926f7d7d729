"""Importance matrices: how large the inputs of each weight matrix are, column by column, on some text."""
