"""Model folders and adapters as files: config, shapes, tensors."""
