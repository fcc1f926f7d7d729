"""What `push` sends: files, records without rows, and the model card."""
