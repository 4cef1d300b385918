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
from ftrun.launch import nodes_apart
from ftrun.rendezvous import handler as handlers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from ftrun.launch.plan import LaunchPlan
    from ftrun.rendezvous.handler import Handler

_OF_ONE_NODE = frozenset(
    {"logs", "env", "notify", "metrics", "standby", "launch", "args", "script", "module", "name", "run_dir"}
)
"""Sections of a job file that may well differ between nodes, or are compared elsewhere."""
_PLACES = (("checkpoint", "local"), ("checkpoint", "root"), ("data", "cache"))
"""Places on a node's own disks, and what is compared by itself."""


def traits(plan: LaunchPlan, workers: int, report: Callable[[str], None]) -> dict[str, str]:
    """What must be the same on all nodes, by a name for people.

    Args:
        plan: this node's.
        workers: how many it has.
        report: is told in words what this start waits for.

    Raises:
        RunDirError: the run directory can't be written.
        UsageError: without a shared run directory, the checkpoint root can't be used.
    """
    found = {
        "ftrun": metadata.version("ftrun"),
        "torch": metadata.version("torch"),
        "the number of workers (--nproc)": str(workers),
        "the run (--name)": plan.run_id,
        "the script": plan.script,
        "run_dir.shared": "true" if plan.shares_run_dir else "false",
        **_places_in_common(plan, report),
    }
    for name, section in plan.job.config.model_dump(mode="json").items():
        if name not in _OF_ONE_NODE:
            found[f"section {name!r} of the job file"] = _digest(name, section)
    return found


def _digest(name: str, section: Any) -> str:
    if isinstance(section, dict):
        section = {key: value for key, value in section.items() if (name, key) not in _PLACES}
    return hashlib.blake2b(json.dumps(section, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()


def _places_in_common(plan: LaunchPlan, report: Callable[[str], None]) -> dict[str, str]:
    """The checkpoint root, and a mark in what all nodes have to share; its name says what to do where they don't."""
    root = {"the checkpoint root": plan.root}
    if not plan.shares_run_dir:
        name = "the mark in the checkpoint root, which all nodes have to share (checkpoint.root),"
        return root | {name: nodes_apart.mark(plan, report)}
    way_out = "give --run-dir on storage that all of them see, or run_dir.shared=false where there is none"
    # First: the usual root lies in the run directory.
    return {f"the mark in the run directory, which all nodes have to share ({way_out}),": _mark(plan)} | root


def _notes(plan: LaunchPlan) -> Path | None:
    """Where the rendezvous keeps its notes; None where all nodes see no place for them."""
    return plan.run_dir.path / "rendezvous" if plan.shares_run_dir else nodes_apart.notes(plan)


def _mark(plan: LaunchPlan) -> str:
    """A text that whoever came first has left in the run directory: the same for all that see the same directory.

    Raises:
        RunDirError: it can't be written.
    """
    file = plan.run_dir.path / "rendezvous" / "mark"
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
    handlers.register(registry, traits(plan, workers, report), report, _notes(plan), plan.node_name)
    made: Handler = registry.create_handler(parameters)  # type: ignore[assignment]
    return made
