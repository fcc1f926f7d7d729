"""The forms in which tables are written: CSV, the JSON of pandas, and columns of Arrow."""
