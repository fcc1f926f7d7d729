"""What is checked before anything is read or loaded."""
