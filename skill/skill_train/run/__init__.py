"""What a run leaves on disk: folder, lock, records, and what differs between two."""
