"""`chat`: one answer at a time, by the same backends as `evaluate`, with the model's own sampling."""
