"""Where bytes are durable: a directory, or an object store through fsspec."""
