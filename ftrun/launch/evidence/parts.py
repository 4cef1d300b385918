"""What each node of an attempt has to say of its end: one file for each, from which the post-mortem is put together.

::

    postmortem/0003/parts/n0001.json     evidence of node 1, and what it decided or why it gave way

A node writes its own file, whole or not at all, and nobody else does. Whoever reads one that is torn, foreign or of
another version passes it over.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ftrun.error_file import ErrorRecord
from ftrun.launch.evidence import files
from ftrun.launch.evidence.model import ClockOffset, Evidence, RankEvidence, Seat
from ftrun.launch.evidence.tail import read_at
from ftrun.launch.failures.failure import Failure, Kind
from ftrun.launch.policy import Decision
from ftrun.launch.watching.watch import Value, Verdict
from ftrun.pulse import Beat, Marks, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ftrun.rundir import RunDir

SCHEMA_VERSION = 1

T = TypeVar("T")

_LARGEST = 8 << 20
_TEXT, _FRAMES, _LINES = 4000, 12, 8
_NAME = re.compile(r"n(\d{4,})\.json")


@dataclass(frozen=True)
class Part:
    """One node's part.

    Attributes:
        evidence: of its ranks, with its seat.
        word: why its workers were ended for what happened elsewhere; empty where it decided by itself.
        failure: what went wrong, where it decided.
        decision: what it decided.
        timeline: moments worth telling: seconds since 1970, and what happened.
        restart: where the seconds of the restart went, once that is known.
        lost: nothing came from this node: the others tell of it, as far as they know.
    """

    evidence: Evidence
    word: str = ""
    failure: Failure | None = None
    decision: Decision | None = None
    timeline: tuple[tuple[float, str], ...] = ()
    restart: Mapping[str, Any] | None = field(default=None)
    lost: bool = False

    @property
    def node(self) -> int:
        """Its number."""
        return self.evidence.node

    @property
    def host(self) -> str:
        """Its name among the nodes of the run."""
        seat = self.evidence.seat
        return seat.hosts[self.node] if seat is not None and self.node < len(seat.hosts) else self.evidence.host


def directory(run_dir: RunDir, attempt: int) -> Path:
    """Where the parts of an attempt are."""
    return run_dir.postmortem(attempt) / "parts"


def write(run_dir: RunDir, attempt: int, part: Part) -> None:
    """Write a node's part, or replace it; one that nobody would read, because it is too large, without its middle.

    Raises:
        OSError: it can't be written.
    """
    text = encode(part)
    place(run_dir, attempt, part.node, text if len(text) <= _LARGEST else encode(shortened(part)))


def place(run_dir: RunDir, attempt: int, node: int, text: str) -> None:
    """Put an encoded part where it belongs.

    Raises:
        OSError: it can't be written.
    """
    where = directory(run_dir, attempt)
    where.mkdir(parents=True, exist_ok=True)
    files.put(where / f"n{node:04d}.json", text)


def encode(part: Part) -> str:
    """A part as a JSON document."""
    # A worker's histogram of steps says nothing of its end.
    ranks = tuple(
        dataclasses.replace(each, beat=dataclasses.replace(each.beat, steps=())) if each.beat is not None else each
        for each in part.evidence.ranks
    )
    whole = dataclasses.replace(part, evidence=dataclasses.replace(part.evidence, ranks=ranks))
    return files.to_json({"schema_version": SCHEMA_VERSION, **files.plain(whole)})


def shortened(part: Part) -> Part:
    """A part without what would take long to send: the ends of what there is of each rank, and of what is said."""

    def short(each: RankEvidence) -> RankEvidence:
        error = each.error
        if error is not None:
            error = dataclasses.replace(error, message=error.message[:_TEXT], traceback=error.traceback[-_TEXT:])
        return dataclasses.replace(each, error=error, stack=each.stack[:_FRAMES], last_lines=each.last_lines[-_LINES:])

    evidence = part.evidence
    ranks, kernel = tuple(map(short, evidence.ranks)), evidence.kernel[-_LINES:]
    what = part.failure
    if what is not None:
        what = dataclasses.replace(what, message=what.message[:_TEXT], why=tuple(each[:_TEXT] for each in what.why))
    evidence = dataclasses.replace(evidence, ranks=ranks, kernel=kernel)
    return dataclasses.replace(part, evidence=evidence, word=part.word[:_TEXT], failure=what)


def stamps(run_dir: RunDir, attempt: int) -> frozenset[tuple[str, int, int]]:
    """Which parts are there, and as of when: another set whenever something has come or changed."""
    found = set()
    try:
        for each in directory(run_dir, attempt).iterdir():
            if _NAME.fullmatch(each.name):
                status = each.stat()
                found.add((each.name, status.st_mtime_ns, status.st_ino))
    except OSError:
        pass
    return frozenset(found)


def read_all(run_dir: RunDir, attempt: int) -> list[Part]:
    """The parts that are there, by number of the node."""
    found = [read(directory(run_dir, attempt) / name) for name, _, _ in sorted(stamps(run_dir, attempt))]
    return sorted((each for each in found if each is not None), key=lambda each: each.node)


def read(path: Path) -> Part | None:
    """Read one part; None for what is none."""
    return decode(read_at(path, 0, _LARGEST))


def decode(data: bytes | str) -> Part | None:
    """Understand what :func:`encode` made; None for anything else."""
    try:
        document = json.loads(data)
        if document["schema_version"] != SCHEMA_VERSION:
            return None
        part = _made(
            Part,
            document,
            evidence=_evidence(document["evidence"]),
            failure=_maybe(document["failure"], lambda each: _made(Failure, each, kind=Kind(each["kind"]))),
            decision=_maybe(document["decision"], lambda each: _made(Decision, each)),
            timeline=tuple((float(at), str(what)) for at, what in document["timeline"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return part if isinstance(part.node, int) and isinstance(part.word, str) else None


def _evidence(document: Any) -> Evidence:
    return _made(
        Evidence,
        document,
        ranks=tuple(_rank(each) for each in document["ranks"]),
        hang=_maybe(document["hang"], lambda each: _made(Verdict, each, value=Value(each["value"]))),
        seat=_maybe(document["seat"], _seat),
    )


def _rank(document: Any) -> RankEvidence:
    return _made(
        RankEvidence,
        document,
        error=_maybe(document["error"], lambda each: _made(ErrorRecord, each)),
        beat=_maybe(document["beat"], _beat),
    )


def _beat(document: Any) -> Beat:
    phase = Phase[document["phase"].upper()]
    return _made(Beat, document, phase=phase, marks=_made(Marks, document["marks"]))


def _seat(document: Any) -> Seat:
    return _made(Seat, document, clock=_maybe(document["clock"], lambda each: _made(ClockOffset, each)))


def _maybe(document: Any, how: Any) -> Any:
    return None if document is None else how(document)


def _made(kind: type[T], document: Mapping[str, Any], /, **values: Any) -> T:
    """A dataclass from an object with its fields; those that are added later are passed over."""
    names = {each.name for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    simple = {name: tuple(each) if isinstance(each, list) else each for name, each in document.items() if name in names}
    return kind(**{**simple, **values})
