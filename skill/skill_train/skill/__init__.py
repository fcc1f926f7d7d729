"""The skill for coding agents, and its installation."""
