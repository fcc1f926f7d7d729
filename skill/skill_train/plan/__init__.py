"""Pure decisions: where to train, on which machine, in which layout."""
