"""What must be the same on all nodes of a run, and the rendezvous that compares it before anybody starts a worker."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from importlib import metadata
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import RendezvousHandlerRegistry

from ftrun import durable
from ftrun.errors import RunDirError
from ftrun.rendezvous import handler as handlers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from ftrun.launch.plan import LaunchPlan
    from ftrun.rendezvous.handler import Handler

_OF_ONE_NODE = frozenset({"logs", "env", "notify", "metrics", "standby", "launch", "args", "script", "module", "name"})
"""Sections of a job file that may well differ between nodes, or are compared elsewhere."""
_PLACES = (("checkpoint", "local"), ("checkpoint", "root"), ("data", "cache"))
"""Places on a node's own disks, and what is compared by itself."""


def traits(plan: LaunchPlan, workers: int) -> dict[str, str]:
    """What must be the same on all nodes, by a name for people.

    Args:
        plan: this node's.
        workers: how many it has.

    Raises:
        RunDirError: the run directory can't be written.
    """
    found = {
        "ftrun": metadata.version("ftrun"),
        "torch": metadata.version("torch"),
        "the number of workers (--nproc)": str(workers),
        "the run (--name)": plan.run_id,
        "the script": plan.script,
        "the checkpoint root": plan.root,
        "the mark in the run directory, which all nodes have to share,": mark(plan),
    }
    for name, section in plan.job.config.model_dump(mode="json").items():
        if name not in _OF_ONE_NODE:
            found[f"section {name!r} of the job file"] = _digest(name, section)
    return found


def _digest(name: str, section: Any) -> str:
    if isinstance(section, dict):
        section = {key: value for key, value in section.items() if (name, key) not in _PLACES}
    return hashlib.blake2b(json.dumps(section, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()


def place(plan: LaunchPlan) -> Path:
    """Where the rendezvous keeps its notes."""
    return plan.run_dir.path / "rendezvous"


def mark(plan: LaunchPlan) -> str:
    """A text that whoever came first has left in the run directory: the same for all that see the same directory.

    Raises:
        RunDirError: it can't be written.
    """
    file = place(plan) / "mark"
    try:
        durable.make_dirs(file.parent)
        with contextlib.suppress(FileExistsError):
            durable.create(file, secrets.token_hex(4).encode())
        return file.read_text()
    except OSError as error:
        raise RunDirError(f"{file} can't be used: {error.strerror}. Choose another place with --run-dir.") from error


def handler(parameters: RendezvousParameters, plan: LaunchPlan, workers: int, report: Callable[[str], None]) -> Handler:
    """Make the handler of ftrun's own rendezvous, the way torch makes handlers.

    Args:
        parameters: torch's.
        plan: this node's.
        workers: how many it has.
        report: is told in words what the rendezvous decides; on threads of its own.
    """
    registry = RendezvousHandlerRegistry()
    handlers.register(registry, traits(plan, workers), report, place(plan))
    made: Handler = registry.create_handler(parameters)  # type: ignore[assignment]
    return made
