"""From evidence to what went wrong. Pure."""
