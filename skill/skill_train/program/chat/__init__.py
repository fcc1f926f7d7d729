"""What a conversation holds beside its texts."""
