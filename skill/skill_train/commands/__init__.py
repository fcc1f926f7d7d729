"""The commands: their options, the steps that they run, and the drawing of their results."""
