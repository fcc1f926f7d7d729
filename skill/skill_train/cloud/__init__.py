"""Runs as Hugging Face jobs: submit a job once, follow it, fetch its files, and continue the run."""
