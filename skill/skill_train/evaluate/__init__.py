"""The step `evaluate`: measures models on held-out rows."""
