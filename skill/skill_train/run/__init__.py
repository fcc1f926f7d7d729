"""The files of a run: its folder, its lock and its records, and the comparison of two runs."""
