"""Reading state back: from the nearest tier, for any number of ranks."""
