"""The step `verify`: every GGUF file against the model that was trained."""
