"""What is known of a worker group at its end, and the post-mortem of it."""
