"""The job file: YAML in, a frozen ``JobConfig`` out, and every mistake named by its line."""
