"""The start of the training: checks of its plan, its inputs and its device."""
