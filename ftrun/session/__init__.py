"""What lives in the user's process: the bootstrap that every worker enters through, and the Session."""
