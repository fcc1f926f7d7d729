"""The metadata of a GGUF file against what config.json states."""
