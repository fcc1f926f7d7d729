"""The step `merge`: base + adapter → one model."""
