"""What this computer is: read without torch."""
