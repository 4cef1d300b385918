"""A directory seen through FUSE that can be written to, and hangs when a test wants it: a file server that is gone.

    with HungMount(source, tmp_path / "mnt") as mount:
        (mount.path / "a").write_text("a")
        mount.hang()      # whoever touches it now waits in the kernel, and can only be killed
        mount.go_on()

The process that serves it ends with the one that made it. ``slow_mount.why_not()`` says why there can be none here.
"""

from __future__ import annotations

from hung_mount.mount import HungMount

__all__ = ["HungMount"]
