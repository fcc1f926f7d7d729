"""A run as a job of Hugging Face: sent once, followed, fetched, continued."""
