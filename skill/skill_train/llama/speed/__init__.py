"""How fast llama.cpp is with a file on this machine: measured, and remembered for later estimates."""
