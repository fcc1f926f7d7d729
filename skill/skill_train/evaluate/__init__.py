"""The step `evaluate`: models on rows that never trained."""
