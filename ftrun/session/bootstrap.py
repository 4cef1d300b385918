"""Where every worker begins: ``python -u -m ftrun.session.bootstrap [-m | --run-path] SCRIPT [ARGS]``.

Sets up what a script gets without knowing ftrun (it dies with its agent, it has a pulse, its last words are kept),
then becomes the script. Imports no torch: the script decides whether and when.

With ``--parked FD`` in place of a script it waits for one, its imports done: see :mod:`ftrun.session.parked`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ftrun import error_file, pulse
from ftrun.contract import WorkerContract
from ftrun.errors import CorruptCheckpoint, LostSnapshot, UsageError
from ftrun.session import imports, lifeline, optimizer_steps, own_store, script, stacks

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """Run the script that the command line names; its exit code is the worker's."""
    arguments = sys.argv[1:]
    sys.meta_path.insert(0, imports.Order())
    if arguments[:1] == ["--parked"]:
        cold = frozenset(sys.modules)
        from ftrun.session import parked

        arguments = parked.wait(int(arguments[1]), cold)
    contract = WorkerContract.from_environment(os.environ)
    lifeline.die_with_parent(contract.agent if contract is not None else 0)
    page = _set_up(contract) if contract is not None else None
    run, target, rest = _what_to_run(arguments)
    if page is not None:
        page.mark("script")
    try:
        run(target, rest)
    except BaseException as error:
        # Not swallowed: written down, shown as the interpreter would show it, and the process ends as it would.
        error.__traceback__ = script.without_own_frames(error)
        if not isinstance(error, SystemExit):
            error_file.write(error, os.environ)
            _show_and_leave(error)
        if error.code not in (None, 0, 75):
            error_file.write(error, os.environ)
        raise error.with_traceback(None) from None


def _set_up(contract: WorkerContract) -> pulse.Pulse:
    directory = Path(contract.worker_dir)
    page = pulse.Pulse(directory / "pulse")
    page.mark("booted")
    stacks.install(directory)
    optimizer_steps.watch(contract, page, rank=_rank())
    own_store.watch(os.environ)
    return page


def _what_to_run(arguments: list[str]) -> tuple[Callable[[str, list[str]], None], str, list[str]]:
    ways = {"-m": script.run_module, "--run-path": script.run_path}
    run = ways.get(arguments[0])
    if run is None:
        return script.run_script, arguments[0], arguments[1:]
    return run, arguments[1], arguments[2:]


def _show_and_leave(error: BaseException) -> NoReturn:
    if isinstance(error, UsageError | CorruptCheckpoint | LostSnapshot):
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
