"""What ``ftrun status`` says of the keeper on this machine: the checkpoint it writes, and what it waits for."""

from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint.keeper.progress import Progress
from ftrun.checkpoint.memory.tier import Tier
from ftrun.config.units import format_duration, format_size

if TYPE_CHECKING:
    from pathlib import Path

_STAGES = {"local": "to the local disk", "root": "to the checkpoint root", "commit": "being committed"}


def draining(run_dir: Path) -> dict[str, Any] | None:
    """The checkpoint that is on its way from memory to the root; None where nothing is, or it can't be seen here."""
    tier = Tier.of(run_dir, 0)
    progress = Progress.read(tier)
    if progress is None:
        return None
    return {
        "step": progress.step,
        "name": progress.attempt,
        "stage": progress.stage,
        "bytes_done": progress.bytes_done,
        "bytes_total": progress.bytes_total,
        "bytes_per_second": progress.rate,
        "seconds_left": progress.eta,
        "waiting": progress.waiting,
        "queued": progress.queued,
        "keeper_alive": _is_held(tier.path / "keeper.lock"),
    }


def _is_held(lock: Path) -> bool:
    """Whether a keeper holds its lock; an instant of holding it here does a new keeper no harm, it tries again."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def drain_text(drain: dict[str, Any] | None) -> str:
    """One line for people, or nothing."""
    if drain is None:
        return ""
    parts = [f"step {drain['step']:,} {_how_far(drain)}"]
    if not drain["keeper_alive"]:
        parts.append("no keeper writes it; the same command takes it up from memory")
    elif drain["waiting"]:
        parts.append(f"waits: {drain['waiting']}")
    else:
        parts += _pace(drain)
    if drain["queued"]:
        parts.append(f"{drain['queued']} more behind it")
    return f"  draining   {'   '.join(parts)}"


def _how_far(drain: dict[str, Any]) -> str:
    stage, total = _STAGES.get(drain["stage"], str(drain["stage"])), drain["bytes_total"]
    if drain["stage"] == "commit" or not total:
        return stage
    return f"{stage}, {drain['bytes_done'] / total:.0%} of {format_size(total)}"


def _pace(drain: dict[str, Any]) -> list[str]:
    if drain["stage"] == "commit":
        return []
    rate, left = drain["bytes_per_second"], drain["seconds_left"]
    return [
        *([f"{format_size(rate)}/s"] if rate else []),
        *([f"{format_duration(left)} left"] if left else []),
    ]
