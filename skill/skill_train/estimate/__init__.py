"""Memory, time and sizes as ranges. Pure arithmetic."""
