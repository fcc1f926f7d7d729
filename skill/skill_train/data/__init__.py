"""Datasets: their rows, formats, problems and tokens."""
