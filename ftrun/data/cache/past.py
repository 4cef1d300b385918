"""Reading past the cache: a path to a file's bytes that takes no room in it, and leaves nothing behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.data.cache import patient
from ftrun.data.cache.copying import Memory
from ftrun.data.cache.leases import Lease
from ftrun.data.cache.refusals import DiskTrouble, Outdated, RemoteError
from ftrun.data.cache.remote import local_path

if TYPE_CHECKING:
    from ftrun.data.cache.node import Node

_IN_MEMORY = 1 << 30


def read_past(node: Node, url: str) -> Lease:
    """A path with a file's bytes: its own on a mount; for a URL, memory, or a nameless file where it's big.

    Raises:
        RemoteError: the file isn't to be had, or there is no room for it anywhere.
    """
    node.page.add("bypasses")
    path = local_path(url)
    if path is not None:
        return Lease(Path(path), "", -1, node.owner)
    for _ in range(node.copying.patience.attempts):
        try:
            return patient.persist(url, lambda: _download(node, url), node.copying.patience)
        except Outdated:
            continue
        except DiskTrouble as error:
            raise RemoteError(
                f"{url}: there is no room for it, neither in the data cache nor in {tempfile.gettempdir()} ({error}). "
                "Free some space, or set TMPDIR to a larger disk"
            ) from error
    raise RemoteError(f"{url} changes faster than it can be downloaded; wait until whoever writes it is done")


def _download(node: Node, url: str) -> Lease:
    listing = node.copying.look(url)
    descriptor = _nameless(listing.size or 0)
    try:
        node.copying.copy(url, listing, Memory(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return Lease(Path(f"/proc/{os.getpid()}/fd/{descriptor}"), "", descriptor, node.owner)


def _nameless(size: int) -> int:
    if size <= _IN_MEMORY:
        return os.memfd_create("ftrun-past", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
