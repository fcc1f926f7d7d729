"""Measures the distance of quantized files from the unquantized file, and chooses types by it."""
