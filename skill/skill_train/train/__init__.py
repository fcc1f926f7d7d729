"""The step `local`: trains on this machine."""
