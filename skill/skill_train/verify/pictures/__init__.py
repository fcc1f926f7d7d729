"""A language model and its projector, two GGUF files, against the vision model that was trained."""
