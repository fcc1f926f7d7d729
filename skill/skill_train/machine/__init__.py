"""The facts of this computer, read without torch."""
