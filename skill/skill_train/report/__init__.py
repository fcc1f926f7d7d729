"""The step `report`: one HTML page."""
