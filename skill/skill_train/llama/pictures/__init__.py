"""Pictures: pairs of a language model and its projector in llama.cpp."""
