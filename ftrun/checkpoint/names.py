"""Names of what lies in a checkpoint root, as :mod:`ftrun.checkpoint.layout` shows it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ftrun.errors import UsageError

MANIFEST = "MANIFEST.json"
LATEST = "LATEST"
EPOCHS, ATTEMPTS, BAD, PINS = "epochs", "ckpt", "bad", "pins"

_ATTEMPT = re.compile(r"e(\d{8,})-s(\d{10,})-([0-9a-f]{8})", re.ASCII)
_EPOCH = re.compile(r"(\d{8,})\.json", re.ASCII)
_DONE = re.compile(r"done/n\d{4,}\.json", re.ASCII)
_GIVEN_UP = re.compile(r"(done/n\d{4,}|r\d{5,})\.failed\.json", re.ASCII)
_RANK_FILE = re.compile(r"r\d{5,}(\.json|\.\d+\.safetensors)", re.ASCII)
NOTE = ".json"


@dataclass(frozen=True, order=True)
class AttemptName:
    """Name of an attempt to save: ``e00000007-s0000001200-5f1c09ab``. Its order is that of (epoch, step).

    Attributes:
        epoch: fencing epoch of the writers.
        step: number of finished steps in the state.
        suffix: eight hexadecimal digits, the same on all ranks, that make the name unique.
    """

    epoch: int
    step: int
    suffix: str

    def __str__(self) -> str:
        return f"e{self.epoch:08d}-s{self.step:010d}-{self.suffix}"

    @classmethod
    def parse(cls, text: str) -> AttemptName | None:
        """Read a name back; None for anything that this class would not have written."""
        match = _ATTEMPT.fullmatch(text)
        if match is None:
            return None
        name = cls(int(match[1]), int(match[2]), match[3])
        return name if str(name) == text else None

    @classmethod
    def of(cls, name: str | AttemptName) -> AttemptName:
        """The name as a value.

        Raises:
            UsageError: the text is no name of a checkpoint.
        """
        parsed = cls.parse(name) if isinstance(name, str) else name
        if parsed is None:
            raise UsageError(f"{name!r} is no name of a checkpoint; `ftrun ckpt ls` lists them")
        return parsed


def rank_json(rank: int) -> str:
    """File, within an attempt, of one rank's non-tensor state."""
    return f"r{rank:05d}.json"


def rank_shard(rank: int, part: int = 0) -> str:
    """File, within an attempt, of one rank's tensors."""
    return f"r{rank:05d}.{part}.safetensors"


def rank_failure(rank: int) -> str:
    """File, within an attempt, by which a rank promises that the attempt will never be committed."""
    return f"r{rank:05d}.failed.json"


def done_json(node: int) -> str:
    """File, within an attempt, by which a node says that its files are written and verified."""
    return f"done/n{node:04d}.json"


def done_failed_json(node: int) -> str:
    """File, within an attempt, by which a node promises never to finish it."""
    return f"done/n{node:04d}.failed.json"


def is_rank_file(file: str) -> bool:
    """Whether a file of an attempt is one that a rank writes."""
    return _RANK_FILE.fullmatch(file) is not None


def is_done(file: str) -> bool:
    """Whether a file of an attempt is a node's done record."""
    return _DONE.fullmatch(file) is not None


def is_given_up(file: str) -> bool:
    """Whether a file of an attempt says that a node or rank gave it up."""
    return _GIVEN_UP.fullmatch(file) is not None


def epoch_key(epoch: int) -> str:
    """Key of an epoch's record."""
    return f"{EPOCHS}/{epoch:08d}.json"


def epoch_number(file: str) -> int | None:
    """The number in the name of an epoch's record; None for any other file."""
    match = _EPOCH.fullmatch(file)
    return int(match[1]) if match is not None else None


def attempt_key(name: AttemptName, file: str) -> str:
    """Key of a file of an attempt."""
    return f"{ATTEMPTS}/{name}/{file}"


def bad_key(name: AttemptName) -> str:
    """Key of the note that an attempt's bytes are known to be damaged."""
    return f"{BAD}/{name}{NOTE}"


def pin_key(name: AttemptName) -> str:
    """Key of the note that a checkpoint is to be kept."""
    return f"{PINS}/{name}{NOTE}"
