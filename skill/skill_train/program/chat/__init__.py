"""What a conversation holds beside its texts, and what of it is trained."""
