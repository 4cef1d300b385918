"""What workers write: log files and the console."""
