"""The same run on machines of other providers: SkyPilot and Colab."""
