"""Where bytes are durable: a directory, or an object store through fsspec.

``base`` says what is asked of storage, ``posix`` and ``remote`` answer, ``retry`` has the patience, and ``drivers``
knows which text means which.
"""
