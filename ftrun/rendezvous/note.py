"""A note in a directory that all nodes share: where the run is led, and who is in its latest round.

A new agent that knows only the endpoint of a host that is gone finds the run by it, and the old host's own new agent
doesn't begin a second run beside the one that goes on. The leader writes the note every second. Who reads it goes by
whether it *changes*, never by its age: no clock is compared with another one's. A note that was left behind by a run of
which nobody lives stands still.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ftrun import durable
from ftrun.rendezvous.model import Who
from ftrun.rendezvous.tie import Claim

if TYPE_CHECKING:
    from pathlib import Path

_NAME = "leader.json"


@dataclass(frozen=True)
class Note:
    """What the leader of a run writes.

    Attributes:
        run_id: the run.
        leader: random identity of the leader.
        name: host name of its node, for people.
        address: where its store is.
        port: where its store is.
        generation: its latest round.
        count: how often it has written.
        members: of the latest round, whose stores know where the leader is as long as they live.
    """

    run_id: str
    leader: str
    name: str
    address: str
    port: int
    generation: int
    count: int
    members: tuple[Who, ...] = ()

    @property
    def places(self) -> list[tuple[str, int]]:
        """Where the leader is, and those who know who follows it."""
        found = [(self.address, self.port), *((each.address, each.port) for each in self.members)]
        return [each for each in dict.fromkeys(found) if each[0] and each[1]]

    def encode(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what :meth:`encode` wrote; fields that are added later are passed over.

        Raises:
            ValueError: it is no note.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            names = {each.name for each in dataclasses.fields(cls)}
            members = tuple(Who(**each) for each in values["members"])
            return cls(**{**{key: value for key, value in values.items() if key in names}, "members": members})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"this is no note of a rendezvous: {text[:80]!r}") from error


class Board:
    """Where notes of one run are.

    Args:
        directory: shared by all nodes; it is made when something is written, but not what it is in: where the storage
            isn't mounted any more, what a node would find there is its own.
        run_id: the run. Notes of another one are passed over.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        self._directory = directory
        self._run_id = run_id

    def read(self) -> Note | None:
        """The note; None where there is none, or a damaged one.

        Raises:
            OSError: the filesystem doesn't say.
        """
        try:
            note = Note.decode((self._directory / _NAME).read_text())
        except (FileNotFoundError, ValueError):
            return None  # one that was torn by a loss of power was written by nobody who lives
        return note if note.run_id == self._run_id else None

    def write(self, note: Note) -> None:
        """Replace the note, whole or not at all; that it outlasts a loss of power would be of no use.

        Raises:
            OSError: anything the filesystem says.
        """
        self._directory.mkdir(exist_ok=True)
        temporary = self._directory / f".{_NAME}.{secrets.token_hex(4)}"
        try:
            temporary.write_text(note.encode())
            os.replace(temporary, self._directory / _NAME)
        finally:
            temporary.unlink(missing_ok=True)

    def claim(self, key: str, node: str, number: int = 1) -> bool:
        """Be the first to make a claim, for good; whether this node is. Twice is no error.

        Args:
            key: what is claimed.
            node: this node.
            number: of the claim, one after the last that there is.

        Raises:
            OSError: the filesystem doesn't say.
        """
        path, mine = self._claimed(key, number), self._word(node)
        self._directory.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            durable.create(path, mine)
        # Not every filesystem keeps its word about files that can be made once: what lies there says who was first.
        return path.read_bytes() == mine

    def claimed(self, key: str, node: str) -> Claim:
        """The last claim that there is.

        Args:
            key: what is claimed.
            node: this node.

        Raises:
            OSError: the filesystem doesn't say.
        """
        found = Claim(key, 0, mine=False)
        with contextlib.suppress(FileNotFoundError):
            while True:
                text = self._claimed(key, found.number + 1).read_bytes()
                found = Claim(key, found.number + 1, text == self._word(node))
        return found

    def _claimed(self, key: str, number: int) -> Path:
        return self._directory / (f"half-{key}" if number == 1 else f"half-{key}.{number}")

    def _word(self, node: str) -> bytes:
        return f"{self._run_id} {node}\n".encode()

    def clear(self, leader: str) -> None:
        """Take the note of a leader away whose run is over."""
        with contextlib.suppress(OSError):
            note = self.read()
            if note is not None and note.leader == leader:
                (self._directory / _NAME).unlink(missing_ok=True)
