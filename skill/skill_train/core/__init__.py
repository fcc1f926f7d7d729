"""What everything stands on: errors, output, files, child processes, digests, secrets."""
