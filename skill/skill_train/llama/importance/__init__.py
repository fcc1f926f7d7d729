"""Importance matrices: for each weight matrix, the mean square of its inputs on some text, for each column."""
