"""Where workers' output goes: a file per rank and attempt in the run directory, and the console as under torchrun.

This is also where each rank's environment is completed: torch hands the variables of all ranks to ``reify`` right
before it starts them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std

from ftrun import pulse
from ftrun.launch.output.attempt import Output

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ftrun.contract import WorkerContract
    from ftrun.launch.output.outlets import Outlets
    from ftrun.launch.output.routes import Tee
    from ftrun.rundir import RunDir


class RunLogs(LogsSpecs):
    """Log files under ``attempts/<attempt>/n<node>/r<rank>/``; never removed by a restart.

    With torchrun's own log options the streams go where those say, and the files have a further name here.

    Args:
        run_dir: the run directory.
        torch_specs: what torchrun's log options ask for, or None if none was given.
        local_ranks: local ranks that reach the console, or None for all.
        environment: variables from the job file, for every worker.
        outlets: the launcher's own streams.
    """

    def __init__(
        self,
        run_dir: RunDir,
        torch_specs: LogsSpecs | None,
        local_ranks: set[int] | None,
        environment: Mapping[str, str],
        outlets: Outlets,
    ) -> None:
        super().__init__(None, Std.NONE, Std.NONE, local_ranks)
        self._run_dir = run_dir
        self._torch_specs = torch_specs
        self._environment = environment
        self._contract: WorkerContract | None = None
        self._starts = 0
        self._variables: Mapping[str, str] = {}
        self._directories: dict[int, Path] = {}
        self.outlets = outlets

    def begin(self, contract: WorkerContract, starts: int, variables: Mapping[str, str] | None = None) -> None:
        """Set what the workers of the next attempt are told; ``worker_dir`` is filled in for each.

        Args:
            contract: what they are told.
            starts: starts of the worker group before this one, the same on all nodes. Torch counts restarts on each
                node for itself, and not all of them.
            variables: of this attempt, for every worker; those of the job file go before them.
        """
        self._contract = contract
        self._starts = starts
        self._variables = variables or {}

    def worker_dir(self, rank: int) -> Path:
        """The directory of a global rank of this node in the current attempt."""
        if self._contract is None:
            raise AssertionError("begin() comes before any worker")
        return self._run_dir.worker(self._contract.attempt, self._contract.node, rank)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete the environments and name the files. Called by torch before each start of the worker group."""
        if self._contract is None:
            raise AssertionError("begin() comes before any worker")
        for environment in envs.values():
            environment["TORCHELASTIC_RESTART_COUNT"] = str(self._starts)  # torch's logs are named by it, too
        destination = self._torch_specs.reify(envs) if self._torch_specs else LogsDest()
        self._directories = {}
        for local_rank, environment in envs.items():
            directory = self.worker_dir(int(environment["RANK"]))
            directory.mkdir(parents=True, exist_ok=True)
            self._directories[local_rank] = directory
            pulse.create(directory / "pulse")
            environment.update({**self._variables, **self._environment})
            self._error_file(destination.error_files, local_rank, directory / "error.json")
            environment["TORCHELASTIC_ERROR_FILE"] = destination.error_files[local_rank]
            environment.update(replace(self._contract, worker_dir=str(directory)).to_environment())
            self._own_file(destination.stdouts, destination.tee_stdouts, local_rank, directory / "stdout.log")
            self._own_file(destination.stderrs, destination.tee_stderrs, local_rank, directory / "stderr.log")
            if self.outlets.launcher.out_terminal:
                # A pager would wait for keys on the worker's own terminal, where none arrive: help() in a debugger
                # has to show its text without one.
                environment.setdefault("PAGER", "cat")
                environment.setdefault("MANPAGER", "cat")
        return destination

    def output(self, destination: LogsDest, tee: Tee) -> Output:
        """The output of the attempt that :meth:`reify` was called for last."""
        return Output(destination, self._directories, tee, self.outlets)

    def _error_file(self, files: dict[int, str], local_rank: int, own: Path) -> None:
        """An error file lies where torch's options have it, and can be read here; without such options it lies here."""
        asked = files.get(local_rank, "")
        if asked in ("", os.devnull):
            files[local_rank] = str(own)
        else:
            own.symlink_to(os.path.abspath(asked))

    def _own_file(self, files: dict[int, str], shown: dict[int, str], local_rank: int, own: Path) -> None:
        """A stream that would be the launcher's own, or nobody's, has a file here."""
        asked = files.get(local_rank, "")
        if asked not in ("", os.devnull):
            return
        files[local_rank] = str(own)
        shown.pop(local_rank, None)
        if asked != os.devnull and (self._local_ranks_filter is None or local_rank in self._local_ranks_filter):
            shown[local_rank] = str(own)

    @property
    def root_log_dir(self) -> str:
        """Where the logs of all attempts are."""
        return str(self._run_dir.attempts)
