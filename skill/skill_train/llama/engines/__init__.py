"""Servers for GGUF files (llama_cpp.server, llama-server, Ollama), started as users start them and asked over HTTP."""
