"""Pictures in rows: where they are, how they are read, and which tokens and tensors the model gets."""
