"""A training on the nodes of a net: one launcher on each, started, ended and awaited."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, TypeVar

from namespaces.diary import Diary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from namespaces.diary import World
    from namespaces.net import Net
    from namespaces.processes import Process

    T = TypeVar("T")

POLL = 0.01

# What a surrounding launcher left in the environment must not reach these.
_FOREIGN = ("FTRUN_", "PET_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "LOGLEVEL")


class Job:
    """Launchers on the nodes of a net, all with the same command, and what their workers write.

    Args:
        net: the nodes.
        command: of the launcher on each.
        folder: where they run, the same directory for all. Workers write ``diary.jsonl`` in it.
        environment: variables on top of this process's.

    Attributes:
        folder: that directory.
        diary: what the workers have written.
        launchers: the latest launcher of each node, by number.
    """

    def __init__(
        self, net: Net, command: Sequence[str | Path], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.net = net
        self.command = [*map(str, command)]
        self.folder = folder
        self.diary = Diary(folder / "diary.jsonl")
        self.launchers: dict[int, Process] = {}
        clean = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self._environment = {**clean, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200", **(environment or {})}

    def start(self, *numbers: int, more: Sequence[str] = (), changed: Mapping[str, str] | None = None) -> None:
        """Start the launcher on these nodes.

        Args:
            numbers: the nodes.
            more: options that these have beyond the others.
            changed: variables that differ there.
        """
        program, *arguments = self.command
        env = {**self._environment, **(changed or {})}
        for number in numbers:
            self.launchers[number] = self.net.node(number).start(program, *more, *arguments, cwd=self.folder, env=env)

    def whole(self, *nodes: int, after: float = 0.0, seconds: float = 60.0) -> World | None:
        """Wait for a whole world of these nodes, started after a moment; None if there is none in time."""
        return self.until(lambda: self.diary.whole(after=after, nodes=nodes), seconds)

    def trains(self, world: World, seconds: float = 60.0) -> float | None:
        """Wait until all workers of a world have made a step. Returns when; None if they didn't in time."""

        def stepped() -> float | None:
            self.diary.worlds()
            return world.first_step

        return self.until(stepped, seconds)

    def until(self, condition: Callable[[], T | None], seconds: float = 60.0) -> T | None:
        """Poll until the condition has a value; None at the deadline, or once all launchers are gone."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = all(each.poll() is not None for each in self.launchers.values())
            value = condition()
            if value or ended:
                return value
            time.sleep(POLL)
        return None

    def finish(self) -> None:
        """Have the workers end well."""
        (self.folder / "done").touch()

    def told(self) -> str:
        """What all launchers have printed, for whoever looks for the reason."""
        parts = [
            f"--- node{number}, exit code {process.poll()}\n{process.text()}"
            for number, process in sorted(self.launchers.items())
        ]
        return "\n".join(parts)
