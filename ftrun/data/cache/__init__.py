"""Remote files on a local disk, once per node: atomic, bounded, leased while in use, safe under kill -9.

How it holds together, for whoever changes it:

- The kernel's locks are the only witness of life. A lease is a shared flock on the object, a download an exclusive
  one on its temporary file, a process a shared one on its page of counters. Whoever dies lets go, also under kill -9
  and in another container; what is not locked is debris.
- Names change under one lock alone (``gc.lock``): to reserve room, give an object its name, evict, sweep. Its file
  also holds how many bytes there are, and whether its last holder died while changing them (then they are counted).
- What may hang is called in a thread of a standing pool, which is left behind then. Training never waits longer than
  :class:`~ftrun.data.cache.records.Patience` says.
- A pointer (a symbolic link that points nowhere) says of each URL which object holds it, when the remote was last
  asked, and the object's size and checksum. A warm open asks nobody but the local disk.
"""
