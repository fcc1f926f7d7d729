"""How tables are written."""
