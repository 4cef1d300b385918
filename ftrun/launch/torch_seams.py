"""Where torch's agent offers no parameter for what ftrun does in its place."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing import SignalException

from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ftrun.launch.processes import Workers


@contextlib.contextmanager
def processes_made_by(make: Callable[..., Workers]) -> Iterator[None]:
    """Let torch's agent prepare the environments, and ours start the processes: torch has no parameter for that."""
    theirs = local_elastic_agent.start_processes
    local_elastic_agent.start_processes = make
    try:
        yield
    finally:
        local_elastic_agent.start_processes = theirs


def bound(argv: tuple[str, ...], local_rank: int, numa_options: Any) -> tuple[str, ...]:
    """A command bound to the processors near its GPU, where ``--numa-binding`` asks for that."""
    if numa_options is None:
        return argv
    from torch.numa import binding

    name = "maybe_wrap_command_args_with_numa_binding"
    wrap = getattr(binding, f"_{name}", None) or getattr(binding, name, None)
    if wrap is None:
        raise UsageError("--numa-binding needs torch 2.10 or newer under ftrun.")
    index = "device_index" if "device_index" in inspect.signature(wrap).parameters else "gpu_index"
    bound: tuple[str, ...] = wrap(argv, numa_options=numa_options, **{index: local_rank})
    return bound


def cannot_start(program: str, error: OSError) -> str:
    """What to say of a program that isn't to be started."""
    text = f"{error.filename or program} can't be started: {error.strerror or error}."
    if os.environ.get("PYTHON_EXEC") == program:
        return f"{text} The variable PYTHON_EXEC names it; correct or unset it."
    return f"{text} Look whether it is there and executable, and how long the arguments and the environment are."


def end(number: int, _frame: object) -> None:
    """What torch does at a signal."""
    raise SignalException(f"process {os.getpid()} got signal {number}", sigval=signal.Signals(number))
