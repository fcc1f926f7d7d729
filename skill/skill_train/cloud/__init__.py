"""A run as a Hugging Face job: submitted once, followed, fetched and continued."""
