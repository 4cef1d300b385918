"""The local tier: a directory of the node, between memory and the root, with the same files under the same names.

::

    <local>/e00000007-s0000001200-5f1c09ab/
        r00003.0.safetensors  r00003.json
        n0001.json               what node 1 has put there, or is about to; a restarted keeper goes on from it

It speeds up a restart and frees memory early; nothing in it is a source of truth.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.checkpoint.keeper.copying import Source
from ftrun.checkpoint.keeper.work import NodeWork
from ftrun.checkpoint.layout import AttemptName
from ftrun.checkpoint.storage.posix import PosixStorage

if TYPE_CHECKING:
    from ftrun.checkpoint.storage.base import Storage

_KEEP = 2


class LocalTier:
    """The attempts of one run that one node keeps. One thread at a time changes any one of them.

    Args:
        directory: of the tier; several nodes and runs may share it.
        node: number of the node.
        run_id: identity of the run.
    """

    def __init__(self, directory: str, node: int, run_id: str) -> None:
        self.storage: Storage = PosixStorage(Path(directory).absolute(), cached=True)  # the upload follows
        self._node, self._run_id = node, run_id

    def works(self) -> list[NodeWork]:
        """What this node has there, oldest first; what was only begun has no files.

        Raises:
            OSError: it can't be listed.
        """
        names = filter(None, map(AttemptName.parse, self.storage.names("")))
        return [work for name in sorted(names) if (work := self._read(name)) is not None]

    def record(self, work: NodeWork) -> None:
        """Note durably what is there, or is about to be.

        Raises:
            OSError: it can't be written.
        """
        self.storage.write(self._key(work.name), work.to_bytes())

    def sources(self, work: NodeWork) -> dict[str, Source]:
        """The files of a copied attempt."""
        top = self.storage.local(str(work.name))
        assert top is not None
        return {file: Source(str(top / file), record) for file, record in work.files.items()}

    def keep(self, work: NodeWork) -> None:
        """An attempt is committed: note it if it is here, and delete all but the newest ones that are.

        Raises:
            OSError: storage failed; nothing depends on it.
        """
        here = self._read(work.name)
        if here is None or not here.files:
            return
        self.record(replace(here, committed=True))
        committed = [each for each in self.works() if each.committed]
        for old in committed[:-_KEEP]:
            self.drop(old)

    def drop(self, work: NodeWork) -> None:
        """Delete what this node has of an attempt.

        Raises:
            OSError: storage failed.
        """
        top = str(work.name)
        mine = tuple(f"r{rank:05d}." for rank in work.first.node_ranks)
        files = [file for file in self.storage.tree(top) if file.lstrip(".").startswith(mine)]
        self.storage.delete([f"{top}/{file}" for file in files])
        self.storage.delete([self._key(work.name)])
        self.storage.remove_directories([top])

    def _key(self, name: AttemptName) -> str:
        return f"{name}/n{self._node:04d}.json"

    def _read(self, name: AttemptName) -> NodeWork | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
            work = NodeWork.from_bytes(self.storage.read(self._key(name)))
            if work.first.run_id == self._run_id and work.name == name:
                return work
        return None
