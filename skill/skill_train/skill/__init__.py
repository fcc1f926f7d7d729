"""The skill as agents get it, and where it is put."""
