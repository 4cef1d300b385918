"""What the coordinator of a ``dcp.save`` tells the ranks, what they answer, and the records that become of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint.plan.pieces import ranks_text
from ftrun.checkpoint.records import About, DoneRecord, RankRecord, TensorEntry, Word
from ftrun.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ftrun.checkpoint.checksums import FileRecord
    from ftrun.checkpoint.plan.pieces import Piece

Offset = tuple[int, ...]

_STEP = re.compile(r"(?:step[-_=]?)?(\d+)", re.ASCII)


@dataclass(frozen=True)
class Order:
    """What a rank is told with its plan.

    Attributes:
        attempt: name of the attempt, new for each save.
        rank: the rank's number within the group that saves.
        holders: by name of each tensor that it writes a part of, the ranks that do, as ``ranks_text`` writes them.
        about: what the manifest will say.
    """

    attempt: str
    rank: int
    holders: dict[str, str]
    about: About


@dataclass(frozen=True)
class Part:
    """What a rank answers when its bytes are safe.

    Attributes:
        attempt: name of the attempt.
        rank: the rank's number.
        entries: tensors that it wrote a part of.
        pieces: where those parts lie.
        values: what it holds that is no tensor, as JSON, by name.
        files: its files.
    """

    attempt: str
    rank: int
    entries: dict[str, TensorEntry]
    pieces: tuple[Piece, ...]
    values: dict[str, Any]
    files: dict[str, FileRecord]


def rank_record(part: Part, step: int) -> RankRecord:
    """The record of a rank other than the first: it says where its bytes lie."""
    return _record(part, step, part.entries, {"dcp": {}, "paths": None})


def index_record(parts: list[Part], step: int, names: Iterable[str], paths: dict[str, list[Any]] | None) -> RankRecord:
    """The first rank's record: it names everything, whoever wrote it.

    Args:
        parts: what the ranks answered, in their order.
        step: for the record.
        names: of all values, in the order in which they shall come back.
        paths: by name, where each value was in the nested state; None where it wasn't nested.
    """
    entries: dict[str, TensorEntry] = {}
    values: dict[str, Any] = {}
    for part in reversed(parts):
        entries |= part.entries
        values |= part.values
    nodes = {name: values.get(name, {"$": "tensor", "name": name}) for name in names}
    return _record(parts[0], step, entries, {"dcp": _mapping(nodes), "paths": paths})


def done_record(part: Part, file: str, record: FileRecord, about: About) -> DoneRecord:
    """A rank's word that its files are whole. Each rank counts as a node: they need not know who shares a machine."""
    return DoneRecord(part.rank, part.files | {file: record}, {part.rank: Word(part.attempt, {})}, about)


def check_whole(parts: list[Part], attempt: str, wanted: Mapping[str, set[Offset] | None]) -> None:
    """Make sure that the ranks together have written what the plan says.

    Args:
        parts: what the ranks answered.
        attempt: the one that is to be committed.
        wanted: offsets of the parts of each tensor; None for what is no tensor.

    Raises:
        CheckpointError: something is missing, or was written for another attempt.
    """
    late = [part.rank for part in parts if part.attempt != attempt]
    if late:
        raise CheckpointError(f"ranks {ranks_text(tuple(late))} wrote {parts[late[0]].attempt} instead of {attempt}")
    values = {name for part in parts for name in part.values}
    held: dict[str, set[Offset]] = {}
    for part in parts:
        for piece in part.pieces:
            held.setdefault(piece.tensor, set()).add(piece.box.offset)
    for name, offsets in wanted.items():
        missing = name not in values if offsets is None else bool(offsets - held.get(name, set()))
        if missing:
            raise CheckpointError(f"checkpoint {attempt}: no rank wrote all of {name!r}")


def plain_paths(planned: Any, names: Iterable[str]) -> dict[str, list[Any]] | None:
    """What DCP's planner notes of a nested state, as JSON; None where it is something else, or misses a name."""
    if not isinstance(planned, Mapping):
        return None
    paths: dict[str, list[Any]] = {}
    for name in names:
        path = planned.get(name)
        if not isinstance(path, tuple) or not path or not all(type(key) in (str, int) for key in path):
            return None
        paths[name] = list(path)
    return paths


def step_of(checkpoint_id: object) -> int | None:
    """The number of finished steps that a ``checkpoint_id`` names: ``1200``, ``"1200"``, ``"step-1200"``.

    Raises:
        UsageError: it names none.
    """
    if checkpoint_id is None:
        return None
    match = _STEP.fullmatch(str(checkpoint_id))
    if match is None:
        raise UsageError(
            f"checkpoint_id {checkpoint_id!r} names no step: give the number of finished steps, as in "
            "checkpoint_id='1200', or leave it out; where checkpoints go is the storage writer's to know"
        )
    return int(match[1])


def _record(part: Part, step: int, entries: dict[str, TensorEntry], tree: Any) -> RankRecord:
    return RankRecord(
        attempt=part.attempt,
        rank=part.rank,
        step=step,
        total=None,
        data=None,
        tree=tree,
        tensors=entries,
        pieces=part.pieces,
    )


def _mapping(nodes: dict[str, Any]) -> Any:
    """Nodes by name as a dict's node."""
    return {"$": "dict", "items": [[name, node] for name, node in nodes.items()]} if "$" in nodes else nodes
