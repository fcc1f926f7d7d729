"""The commands: their options, what they compose, and how it is drawn."""
