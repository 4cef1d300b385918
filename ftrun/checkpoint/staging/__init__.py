"""Copying state into the memory tier beside the training loop."""
