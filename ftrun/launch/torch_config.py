"""From a plan to torch's own configuration, command and rendezvous settings. Makes nothing and writes no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftrun.errors import UsageError
from ftrun.launch.nodes_address import of_interface
from ftrun.launch.nodes_choice import BACKEND, number_of_nodes

if TYPE_CHECKING:
    import argparse

    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from ftrun.launch.plan import LaunchPlan

_BOOTSTRAP = "ftrun.session.bootstrap"
_PROBE_SECONDS = 20.0
_LOG_OPTIONS = ("log_dir", "redirects", "tee", "local_ranks_filter", "logs_specs")


@dataclass(frozen=True)
class TorchSettings:
    """What torch's agent is made from.

    Attributes:
        config: torch's launch configuration.
        entrypoint: program of a worker.
        arguments: its arguments, the bootstrap put before the script.
        one_node: nobody else can join, so there is nothing to meet for.
        notes: what the user should know before it starts.
        parkable: workers are Python processes that begin with the bootstrap, so standbys can stand in for them.
        logs: what torchrun's log options ask for, or None where none was given.
        agent_options: arguments of the agent's constructor.
    """

    config: LaunchConfig
    entrypoint: str
    arguments: list[str]
    logs: LogsSpecs | None
    agent_options: dict[str, Any]
    one_node: bool
    parkable: bool
    notes: tuple[str, ...]


def settle(plan: LaunchPlan) -> TorchSettings:
    """Have torch read the options, as ``torchrun`` does.

    Raises:
        UsageError: torch refuses them, or this node hasn't got what they ask for.
    """
    from torch.distributed.run import config_from_args

    namespace = plan.namespace
    one_node = _settle_rendezvous(namespace, plan)
    workers = local_world_size(namespace.nproc_per_node)
    namespace.nproc_per_node = str(workers)
    if workers > 1:
        # What torch does next anyway, with a warning of six lines.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks = workers * number_of_nodes(str(namespace.nnodes))[1]
    if beyond := [fault.rank for fault in plan.contract.faults if fault.rank >= ranks]:
        raise UsageError(f"faults: there is no rank {beyond[0]} among {ranks}; ranks go from 0 to {ranks - 1}.")
    own_files = all(plan.launch[name].origin == "default" for name in _LOG_OPTIONS)
    if own_files:
        namespace.log_dir = os.devnull  # or torch makes a temporary directory that nobody uses
    try:
        config, entrypoint, arguments = config_from_args(namespace)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise UsageError(f"torch refuses these options: {error or 'no reason given'}") from error
    bare = namespace.no_python or not _has_ftrun(os.getenv("PYTHON_EXEC", sys.executable))
    entrypoint, arguments = _command(namespace, entrypoint, arguments, bare=bare)
    if hasattr(config, "signals_to_handle"):  # torch 2.10 or newer
        heard = [each for each in config.signals_to_handle.split(",") if not _ignored(each)]
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(heard)
    logs = None if own_files else config.logs_specs
    return TorchSettings(
        config,
        entrypoint,
        arguments,
        logs,
        _agent_options(plan, config),
        one_node=one_node,
        parkable=not bare,
        notes=_notes(workers, bare=bare and not namespace.no_python),
    )


def _ignored(name: str) -> bool:
    """Whether ``nohup`` asks that the end of a terminal be ignored.

    A shell has its background jobs ignore SIGINT and SIGQUIT, too; sent by hand, they are heard as under torchrun.
    """
    return name.strip() == "SIGHUP" and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def local_world_size(nproc_per_node: str) -> int:
    """The number of workers on this node.

    Raises:
        UsageError: it is no number, or this node has no such devices.
    """
    from torch.distributed.run import determine_local_world_size

    try:
        size = int(determine_local_world_size(nproc_per_node))
    except ValueError as error:
        reason = str(error).rstrip(".") if str(nproc_per_node) in ("cpu", "gpu", "xpu", "auto") else "it is no number"
        raise UsageError(
            f"--nproc-per-node {nproc_per_node}: {reason}. Give a number of workers, or auto, cpu or gpu."
        ) from error
    if size < 1:
        raise UsageError(f"--nproc-per-node {nproc_per_node}: at least one worker is needed.")
    return size


def _notes(workers: int, *, bare: bool) -> tuple[str, ...]:
    import torch

    notes = []
    gpus = torch.cuda.device_count()  # asks NVML, and makes no context
    if 0 < gpus < workers:
        some = f"{gpus} GPU{'s' if gpus > 1 else ''}"
        notes.append(f"{workers} workers, and this node shows {some}: --nproc gpu starts one for each")
    if bare:
        python = os.environ["PYTHON_EXEC"]
        notes.append(f"{python} (PYTHON_EXEC) hasn't got ftrun: its workers run without a pulse, stacks and standbys")
    return tuple(notes)


def _command(
    namespace: argparse.Namespace, entrypoint: Any, arguments: list[str], *, bare: bool
) -> tuple[str, list[str]]:
    """The program of a worker and its arguments, with the bootstrap before the script unless that is ``bare``."""
    if namespace.run_path and bare:
        raise UsageError("--run-path needs an interpreter that has ftrun; PYTHON_EXEC names one that hasn't.")
    if namespace.run_path:
        # Torch would have a function run in a process of multiprocessing's; the bootstrap does the same in its own.
        python = os.getenv("PYTHON_EXEC", sys.executable)
        script = [namespace.training_script, *namespace.training_script_args]
        return python, ["-u", "-m", _BOOTSTRAP, "--run-path", *script]
    if bare:
        return str(entrypoint), arguments
    return str(entrypoint), [arguments[0], "-m", _BOOTSTRAP, *arguments[1:]]


def _has_ftrun(python: str) -> bool:
    """Whether an interpreter that ``PYTHON_EXEC`` names can begin with the bootstrap; of one that isn't there, yes."""
    if python == sys.executable:
        return True
    try:
        probe = [python, "-c", f"import {_BOOTSTRAP}"]
        return subprocess.run(probe, capture_output=True, timeout=_PROBE_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return True


def _settle_rendezvous(namespace: argparse.Namespace, plan: LaunchPlan) -> bool:
    """What ``torchrun`` does with its options before it makes a configuration of them.

    Returns:
        Whether the run is this node's alone.
    """
    if plan.ours:
        namespace.rdzv_backend = BACKEND
        namespace.local_addr = namespace.local_addr or of_interface(os.environ)
        if plan.launch["rdzv_id"].origin == "default":
            namespace.rdzv_id = plan.run_id
    alone = str(namespace.nnodes) in ("1", "1:1")
    # Up to torch 2.11 the port has a default, so there it counts as given.
    static = namespace.rdzv_backend == "static" and not namespace.rdzv_endpoint and namespace.master_port is None
    one_node = alone and (namespace.standalone or static)
    if namespace.standalone or one_node:
        namespace.rdzv_backend = "c10d"
        namespace.rdzv_endpoint = "localhost:0"
        namespace.rdzv_id = str(uuid.uuid4())
    if not namespace.rdzv_id:
        namespace.rdzv_id = str(uuid.uuid4().int)
    if namespace.master_port is None:
        namespace.master_port = 29500
    return bool(one_node)


def _agent_options(plan: LaunchPlan, config: LaunchConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"start_method": config.start_method}
    options["log_line_prefix_template"] = config.log_line_prefix_template
    if hasattr(config, "shutdown_timeout"):
        given = plan.launch["shutdown_timeout"].origin != "default"
        options["shutdown_timeout"] = config.shutdown_timeout if given else int(plan.grace)
    return options
