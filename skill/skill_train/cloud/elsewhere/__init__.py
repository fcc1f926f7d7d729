"""Runs on machines of other providers, through SkyPilot and Colab."""
