"""Pure decisions: where to train, on what, laid out how."""
