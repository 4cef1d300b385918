"""Whether a worker group makes progress."""
