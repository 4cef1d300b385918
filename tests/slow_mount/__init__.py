"""A directory seen through FUSE, as slow and as broken as a test wants it: the remote storage of the data tests.

    with SlowMount(source, tmp_path / "mnt", open_seconds=0.02) as mount:
        (mount.path / "a.bin").read_bytes()   # takes 20 ms longer than (source / "a.bin").read_bytes()
        assert mount.counts() == Counts(opens=1, bytes=...)

``why_not()`` says why there can be no such mount on this machine, for a ``skipif``. The process that serves the mount
unmounts it and ends when the one that made it ends, however that happens.
"""

from __future__ import annotations

from slow_mount.mount import SlowMount, why_not
from slow_mount.page import Counts

__all__ = ["Counts", "SlowMount", "why_not"]
