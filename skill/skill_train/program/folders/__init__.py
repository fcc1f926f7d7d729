"""What lies in the folders of a model and of a training, as files."""
