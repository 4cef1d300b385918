"""What a run's events say: history, where the seconds went, and a picture of the loss."""
