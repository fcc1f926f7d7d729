"""Every request to the Hugging Face Hub."""
