"""Chat rows: the calls, thoughts and keys of their messages, and which tokens are trained."""
