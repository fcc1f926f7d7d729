"""The steps of `export-gguf`: convert, quantize, and the Modelfile."""
