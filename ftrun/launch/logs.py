"""Where workers' output goes: a file per rank and attempt in the run directory, and the console as under torchrun.

This is also where each rank's environment is completed: torch hands the variables of all ranks to ``reify`` right
before it starts them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std

from ftrun import pulse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ftrun.contract import WorkerContract
    from ftrun.rundir import RunDir


class RunLogs(LogsSpecs):
    """Log files under ``attempts/<attempt>/n<node>/r<rank>/``; never removed by a restart.

    With torchrun's own log options the streams go where those say, and only pulses and error files stay here.

    Args:
        run_dir: the run directory.
        torch_specs: what torchrun's log options ask for, or None if none was given.
        local_ranks: local ranks that reach the console, or None for all.
        environment: variables from the job file, for every worker.
    """

    def __init__(
        self,
        run_dir: RunDir,
        torch_specs: LogsSpecs | None,
        local_ranks: set[int] | None,
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(None, Std.NONE, Std.NONE, local_ranks)
        self._run_dir = run_dir
        self._torch_specs = torch_specs
        self._environment = environment
        self._contract: WorkerContract | None = None

    def begin(self, contract: WorkerContract) -> None:
        """Set what the workers of the next attempt are told; ``worker_dir`` is filled in for each."""
        self._contract = contract

    def worker_dir(self, rank: int) -> Path:
        """The directory of a global rank of this node in the current attempt."""
        if self._contract is None:
            raise AssertionError("begin() comes before any worker")
        return self._run_dir.worker(self._contract.attempt, self._contract.node, rank)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete the environments and name the files. Called by torch before each start of the worker group."""
        if self._contract is None:
            raise AssertionError("begin() comes before any worker")
        destination = self._torch_specs.reify(envs) if self._torch_specs else LogsDest()
        for local_rank, environment in envs.items():
            directory = self.worker_dir(int(environment["RANK"]))
            directory.mkdir(parents=True, exist_ok=True)
            pulse.create(directory / "pulse")
            error_file = str(directory / "error.json")
            destination.error_files[local_rank] = error_file
            environment.update(self._environment)
            environment["TORCHELASTIC_ERROR_FILE"] = error_file
            environment.update(replace(self._contract, worker_dir=str(directory)).to_environment())
            if self._torch_specs is None:
                self._own_files(destination, local_rank, directory)
        return destination

    def _own_files(self, destination: LogsDest, local_rank: int, directory: Path) -> None:
        destination.stdouts[local_rank] = str(directory / "stdout.log")
        destination.stderrs[local_rank] = str(directory / "stderr.log")
        if self._local_ranks_filter is None or local_rank in self._local_ranks_filter:
            destination.tee_stdouts[local_rank] = destination.stdouts[local_rank]
            destination.tee_stderrs[local_rank] = destination.stderrs[local_rank]

    @property
    def root_log_dir(self) -> str:
        """Where the logs of all attempts are."""
        return str(self._run_dir.attempts)
