"""GGUF files and llama.cpp, in child processes."""
