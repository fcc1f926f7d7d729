"""Predicts before the training whether llama.cpp can convert a model correctly."""
