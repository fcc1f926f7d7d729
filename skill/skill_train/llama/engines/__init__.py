"""Programs that serve a GGUF file, started as their users start them and asked over HTTP on this machine."""
