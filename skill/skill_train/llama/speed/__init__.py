"""Measures the speed of llama.cpp on this machine, and caches the result for later estimates."""
