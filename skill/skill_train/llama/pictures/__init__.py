"""Runs a language model with its projector, which reads pictures, in llama.cpp."""
