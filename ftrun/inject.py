"""Scripted faults: failures as an input, for demonstrations and tests. Each fires once in a run.

A fault is marked as fired, durably, before it fires: the attempt that resumes before its step passes it unharmed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import TYPE_CHECKING

from ftrun import durable, events
from ftrun.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path

    from ftrun.contract import Fault, WorkerContract


class InjectedFault(RuntimeError):
    """Raised by a scripted fault with ``do: raise``."""


def fire_if_due(contract: WorkerContract, rank: int, step: int) -> None:
    """Do what the job's ``faults`` ask of this rank at this step. Called on every rank as a step begins.

    Args:
        contract: what the launcher told this worker.
        rank: global rank of this worker.
        step: 1-based number of the step that is about to begin.

    Raises:
        InjectedFault: for ``do: raise``.
    """
    for index, fault in enumerate(contract.faults):
        if fault.at_step == step and fault.rank == rank and _claim(contract, index):
            log = events.EventLog(RunDir(contract.run_path).events(contract.node), attempt=contract.attempt, rank=rank)
            log.write(events.FaultInjected(step=step, do=fault.do))
            _fire(fault)


def fired(contract: WorkerContract) -> frozenset[int]:
    """Which of the job's ``faults`` have fired so far, by index. Called by the launcher."""
    return frozenset(index for index in range(len(contract.faults)) if _mark(contract, index).exists())


def _mark(contract: WorkerContract, index: int) -> Path:
    return RunDir(contract.run_path).control / f"fault-{index}.fired"


def _claim(contract: WorkerContract, index: int) -> bool:
    try:
        durable.create(_mark(contract, index), b"")
    except FileExistsError:
        return False
    return True


def _fire(fault: Fault) -> None:
    if fault.do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.do == "exit":
        os._exit(1)
    elif fault.do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    elif fault.do == "segv":
        ctypes.string_at(0)
    elif fault.do == "hang":
        threading.Event().wait()
    elif fault.do == "spin":
        while True:
            pass
    raise InjectedFault(f"scripted fault: raise at step {fault.at_step} on rank {fault.rank}")
