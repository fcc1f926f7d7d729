"""The recipe: the values that the user sets, their defaults, and their checks."""
