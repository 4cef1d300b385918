"""Looks at the records in sealed slots before anything of them is copied: what can't be read back is no checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.checkpoint.checksums import record_of
from ftrun.checkpoint.keeper.copying import SourceError
from ftrun.checkpoint.layout import rank_json
from ftrun.checkpoint.memory.files import read
from ftrun.checkpoint.records import RankRecord

if TYPE_CHECKING:
    from ftrun.checkpoint.keeper.work import NodeWork
    from ftrun.checkpoint.records import Seal


def vet(work: NodeWork) -> None:
    """Read the record of each rank as a restart would.

    Raises:
        SourceError: one can't be read, is damaged, or isn't that of its rank.
    """
    for seal in work.seals:
        _vet(seal)


def _vet(seal: Seal) -> None:
    name = rank_json(seal.rank)
    path, expected = seal.files[name]
    try:
        content = read(Path(path))
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror or error}") from error
    if record_of(content) != expected:
        raise SourceError(f"{path} has changed since it was written: is this machine's memory or disk faulty?")
    try:
        record = RankRecord.from_bytes(content)
    except ValueError as error:
        raise SourceError(f"the record of rank {seal.rank} can't be read back: {name} {error}") from error
    if (record.attempt, record.rank, record.step) != (seal.attempt, seal.rank, seal.step):
        raise SourceError(f"{name} is that of rank {record.rank} of {record.attempt}")
    foreign = {piece.file for piece in record.pieces} - seal.files.keys()
    if foreign:
        raise SourceError(f"{name} names {min(foreign)}, which its rank has not stored")
