"""``ftrun`` and ``python -m ftrun``."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftrun.launch.standbys.standby import Standbys

NOT_A_RUN = ("status", "nodes", "cache", "ckpt", "config", "--help", "--version")
"""First words of command lines that start no workers."""


def main() -> None:
    """Run the command line."""
    _open_standard_streams()
    try:
        # Before everything else: the workers' imports take longest, and can go on beside this process's own.
        with _workers_under_way(sys.argv[1:]) as standbys:
            from ftrun.cli.app import app

            app(obj=standbys)
    except KeyboardInterrupt:
        _end_before_torch_does(130)
        raise SystemExit(130) from None
    except SystemExit as end:
        _end_before_torch_does(end.code)
        raise
    except Exception as error:  # a mistake of ftrun's own, which is shown in full
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            # Wherever a path is first looked at: of the script, the job file, a root, a run that is asked for.
            print(f"ftrun: {error.filename}: no file can have so long a name; give a shorter one", file=sys.stderr)
            _end_before_torch_does(2)
            raise SystemExit(2) from None
        _end_before_torch_does(1, error)
        raise


def _workers_under_way(arguments: list[str]) -> contextlib.AbstractContextManager[Standbys | None]:
    if not arguments or arguments[0] in NOT_A_RUN:
        return contextlib.nullcontext()
    # Imports make objects that stay: to look for garbage among them takes a tenth of the start. See supervise.
    gc.disable()
    from ftrun.launch.standbys import early

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _not_yet)  # the agent has a better use for them, when it is there
    return early.begin(arguments, os.environ)


def _end_before_torch_does(code: object, error: Exception | None = None) -> None:
    """End at once where a thread is in a call to a store of torch's, which aborts an interpreter that ends.

    Nothing ends such a call before its time, and the name server may have it wait for ten seconds.
    """
    line = sys.modules.get("ftrun.rendezvous.line")
    if line is None or line.settle(0.0):
        return
    if error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _not_yet(number: int, _frame: object) -> None:
    os.write(2, f"ftrun  ! {signal.Signals(number).name} is ignored: the run is only starting\n".encode())


def _open_standard_streams() -> None:
    """Give closed standard streams (``ftrun ... >&-``) a place to go, before a file of ours gets their number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.dup2(descriptor, number)
            if descriptor > 2:
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, mode))


if __name__ == "__main__":
    main()
