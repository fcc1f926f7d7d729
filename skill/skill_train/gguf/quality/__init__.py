"""How good quantized files are, measured: their distance from the unquantized file, and what is chosen by it."""
