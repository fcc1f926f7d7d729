"""The same run on other people's machines: SkyPilot, Colab."""
