"""Pictures in rows: where they are, how they are read, and what the model takes of them."""
