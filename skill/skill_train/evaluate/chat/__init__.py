"""`chat`: one answer at a time, by transformers or llama.cpp, with the model's own sampling."""
