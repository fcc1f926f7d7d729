"""The weights in a GGUF file against those of the model that was trained."""
