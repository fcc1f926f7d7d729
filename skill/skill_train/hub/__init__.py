"""Every question to the Hugging Face Hub."""
