"""Where every worker begins: ``python -u -m ftrun.session.bootstrap [-m] SCRIPT [ARGS]``.

Sets up what a script gets without knowing ftrun (it dies with its agent, it has a pulse, its last words are kept),
then becomes the script. Imports no torch: the script decides whether and when.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from ftrun import error_file, pulse
from ftrun.contract import WorkerContract
from ftrun.errors import CorruptCheckpoint, UsageError
from ftrun.session import lifeline, optimizer_steps, script


def main() -> None:
    """Run the script that the command line names; its exit code is the worker's."""
    contract = WorkerContract.from_environment(os.environ)
    lifeline.die_with_parent(contract.agent if contract is not None else 0)
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    target, *rest = arguments[as_module:]
    if contract is not None:
        optimizer_steps.watch(contract, pulse.Pulse(Path(contract.worker_dir) / "pulse"), rank=_rank())
    try:
        (script.run_module if as_module else script.run_script)(target, rest)
    except BaseException as error:
        # Not swallowed: written down, shown as the interpreter would show it, and the process ends as it would.
        error.__traceback__ = script.without_own_frames(error)
        if not isinstance(error, SystemExit):
            error_file.write(error, os.environ)
            _show_and_leave(error)
        if error.code not in (None, 0, 75):
            error_file.write(error, os.environ)
        raise error.with_traceback(None) from None


def _show_and_leave(error: BaseException) -> NoReturn:
    if isinstance(error, UsageError | CorruptCheckpoint):
        # The launcher shows the message once for all ranks, and says what to do.
        sys.exit(2 if isinstance(error, UsageError) else 1)
    sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        # Let out of here, it makes the interpreter end by SIGINT; it has been shown already.
        sys.excepthook = lambda *_: None
        raise error
    sys.exit(1)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


if __name__ == "__main__":
    main()
