"""A cloud job: what it keeps in the mounted bucket, and what it pushes to the Hub."""
