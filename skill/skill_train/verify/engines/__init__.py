"""Checks of a GGUF file in the programs that serve it: the prompt as they write it, the greedy answer, its end."""
