"""The files in the folders of base models and of checkpoints."""
