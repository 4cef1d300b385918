"""Who stores which tensor of a checkpoint, and where: the records of its ranks, read when they are needed. No torch."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ftrun.checkpoint.layout import rank_json
from ftrun.checkpoint.plan.pieces import ranks_of
from ftrun.checkpoint.records import RankRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.checkpoint.loading.files import Files
    from ftrun.checkpoint.plan.pieces import Piece
    from ftrun.checkpoint.records import TensorEntry
    from ftrun.errors import CorruptCheckpoint


class Index:
    """The records of a checkpoint. One thread uses it.

    Args:
        files: the checkpoint's files.
        itemsize: bytes of an element, by name of its type.
    """

    def __init__(self, files: Files, itemsize: Callable[[str], int]) -> None:
        self._files = files
        self._itemsize = itemsize
        self._records: dict[int, RankRecord] = {}
        self._pieces: dict[int, dict[str, list[Piece]]] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._sizes: dict[str, int] = {}

    def record(self, rank: int) -> RankRecord:
        """A rank's record.

        Raises:
            CorruptCheckpoint: it is damaged, missing, or not that rank's.
            CheckpointError: it can't be read.
        """
        if rank not in self._records:
            record = self._read(rank)
            pieces: defaultdict[str, list[Piece]] = defaultdict(list)
            for piece in record.pieces:
                pieces[piece.tensor].append(piece)
            self._records[rank], self._pieces[rank] = record, dict(pieces)
        return self._records[rank]

    def _read(self, rank: int) -> RankRecord:
        name = rank_json(rank)
        try:
            record = RankRecord.from_bytes(self._files.content(name))
        except ValueError as error:
            raise self._files.corrupt(name, str(error)) from error
        if (record.attempt, record.rank) != (str(self._files.name), rank):
            raise self._files.corrupt(name, f"is that of rank {record.rank} of {record.attempt}")
        return record

    def pieces(self, rank: int, name: str) -> list[Piece]:
        """All pieces of a tensor of a rank's tree, from all ranks that share it.

        Raises:
            CorruptCheckpoint: the records don't fit together.
            CheckpointError: a record can't be read.
        """
        entry = self.record(rank).tensors[name]
        return [piece for holder in self._holders(rank, entry) for piece in self._pieces_of(holder, name, entry)]

    def malformed(self, rank: int, name: str, what: str) -> CorruptCheckpoint:
        """The error for a tensor of which a rank's record says what can't be."""
        return self._files.corrupt(rank_json(rank), f"has no proper tensor {name!r}: {what}")

    def _holders(self, rank: int, entry: TensorEntry) -> tuple[int, ...]:
        holders = self._ranks.get(entry.ranks)
        if holders is None:
            holders = self._ranks[entry.ranks] = ranks_of(entry.ranks)
            if holders[-1] >= self._files.world_size:
                raise self._files.corrupt(rank_json(rank), f"names rank {holders[-1]}, which there was not")
        return holders

    def _pieces_of(self, rank: int, name: str, entry: TensorEntry) -> list[Piece]:
        mine = self.record(rank).tensors.get(name)
        if mine is not entry and not _is_same(mine, entry):
            raise self.malformed(rank, name, f"it is not that of the other ranks of {entry.ranks}")
        pieces = self._pieces[rank].get(name, [])
        itemsize = self._itemsize(entry.dtype)
        for piece in pieces:
            problem = piece_problem(piece, entry.shape, itemsize, self._size(piece.file))
            if problem:
                raise self.malformed(rank, name, problem)
        return pieces

    def _size(self, file: str) -> int:
        if file not in self._sizes:
            self._sizes[file] = self._files.size(file)
        return self._sizes[file]


def _is_same(one: TensorEntry | None, other: TensorEntry) -> bool:
    return one is not None and (one.dtype, one.shape, one.ranks) == (other.dtype, other.shape, other.ranks)


def piece_problem(piece: Piece, shape: tuple[int, ...], itemsize: int, size: int) -> str:
    """What is wrong with a piece of a tensor of that shape in a file of that size; empty for nothing."""
    box = piece.box
    if len(box.shape) != len(shape):
        return f"a piece has {len(box.shape)} dimensions, the tensor {len(shape)}"
    if box.shape != shape or any(box.offset):
        ends = [first + extent for first, extent in zip(box.offset, box.shape, strict=True)]
        if any(end > whole for end, whole in zip(ends, shape, strict=True)):
            return "a piece reaches beyond it"
    if not 0 <= piece.start <= piece.stop <= box.numel:
        return "a piece is longer than its block"
    if piece.offset % itemsize or piece.offset + (piece.stop - piece.start) * itemsize > size:
        return f"a piece lies at byte {piece.offset} of {piece.file}, which has {size}"
    return ""
