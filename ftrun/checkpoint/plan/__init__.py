"""Who stores which bytes of a state: decided before anything is copied."""
