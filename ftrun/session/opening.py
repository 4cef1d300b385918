"""Opening a Session: under ftrun, under plain torchrun, and under plain python."""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ftrun import oom
from ftrun.contract import Every, WorkerContract
from ftrun.errors import UsageError
from ftrun.pulse import Pulse
from ftrun.session import agreement
from ftrun.session.place import Place
from ftrun.session.process_group import default_group, device_for
from ftrun.session.session import Session, positive

if TYPE_CHECKING:
    from collections.abc import Iterator


_had: set[str] = set()
"""Attempts of which this process has had its Session. A second one would go back to where the attempt began, and name
its saves as the first one did: nobody would ever commit them."""


@contextlib.contextmanager
def opened(*, every: int | None = None, process_group: bool = True) -> Iterator[Session]:
    """A Session for the length of a block; see :meth:`ftrun.Session.open`."""
    place = Place.from_environment(os.environ)
    device = device_for(place)
    interval = None if every is None else Every(steps=positive(every))
    contract = WorkerContract.from_environment(os.environ)
    if contract is not None and Path(contract.worker_dir).name != f"r{place.rank:05d}":
        raise UsageError(
            f"this process calls itself rank {place.rank}, but ftrun started it, or its parent, as "
            f"{Path(contract.worker_dir).name}. Processes that a worker starts can't have a Session of their own: "
            f"start them without {WorkerContract.VARIABLE} in their environment, or start all ranks with ftrun."
        )
    if contract is not None and contract.start in _had:
        raise UsageError(
            "this worker has had its Session already: a run has one, for all of its steps. Train everything inside of "
            "one function or one `with` block, or start a script of its own for each part."
        )
    if contract is not None and contract.agent:
        oom.come_before_keeper(contract.agent)
    _mark(contract, "group")
    with contextlib.ExitStack() as stack:
        if process_group:
            stack.enter_context(default_group(place, device))
        _mark(contract, "grouped")
        if contract is not None:
            if contract.start:
                _had.add(contract.start)
            store = agreement.connect(place, f"epoch-{contract.epoch}")
        else:
            from ftrun.session import alone  # what a launcher's workers have no use for

            # Every restart under torchrun has a count of its own, so no answer of an earlier life is read.
            store = agreement.connect(place, f"alone-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")
            contract = stack.enter_context(alone.leading(place, store, os.environ))
        for module in contract.callbacks:
            _import(module)
        session = Session(place, device, contract, store, every=interval)
        try:
            yield session
            session.leave()
        finally:
            session.close()


def _mark(contract: WorkerContract | None, name: Literal["group", "grouped"]) -> None:
    """Nobody waits for the marks of a process without a launcher, and it has no page yet."""
    if contract is not None:
        Pulse(Path(contract.worker_dir) / "pulse").mark(name)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise UsageError(
            f"callbacks: there is no module {module!r} (looked in the script's directory and the installed packages). "
            "Check its name in the job file."
        ) from error
