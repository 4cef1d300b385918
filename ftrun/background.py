"""Processes beside training that live as long as a run: how they are started, give way, and end. No torch."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import ftrun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def start(
    module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], inherits: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` in a session of its own, last in the queue for disks. SIGTERM is blocked there.

    Args:
        module: its name. It calls :func:`main`, and :func:`take_sigterm` as soon as it can.
        arguments: for it.
        log: file that its output is appended to.
        environment: its variables.
        inherits: descriptors that it gets, under the same numbers.

    Raises:
        OSError: it can't be started, or the log not be written.
    """
    # Without the current directory on its path: a script's neighbours may be named like modules of the library.
    command = [sys.executable, "-P", "-m", module, *arguments]
    variables = dict(environment)
    home = Path(ftrun.__file__).parent.parent
    if home.name not in ("site-packages", "dist-packages"):  # those are found, and must not come before the library
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [variables.get("PYTHONPATH"), str(home)]))
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    # A signal that comes before it can take one must not end it: it inherits the mask, and lifts it when it can.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=variables,
            start_new_session=True,
            pass_fds=inherits,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(output)
    _let_others_read_first(process.pid)
    return process


def take_sigterm(handler: Callable[[int, object], None]) -> None:
    """Take SIGTERM from now on. A terminal's signals are not meant for such a process."""
    signal.signal(signal.SIGTERM, handler)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def give_way(nice: int) -> None:
    """Let training come first for the processor; whoever started this process has seen to the disks."""
    with contextlib.suppress(OSError):
        os.nice(nice)
    # A session of its own is a scheduling group of its own where the kernel groups by sessions.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


def main(body: Callable[[Sequence[str]], int]) -> NoReturn:
    """Be such a process: call the body with the arguments, and end with the code that it returns."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    code = body(sys.argv[1:])
    logging.shutdown()
    # Threads that hang in a driver or in the kernel must not keep the process.
    os._exit(code)


def _let_others_read_first(pid: int) -> None:
    """Give a process the lowest priority for disks that still gets its turn. Its threads will inherit it."""
    # From here, since this import costs such a process a tenth of its start, and launchers have it.
    import psutil

    with contextlib.suppress(psutil.Error, OSError):  # a courtesy, and it may have ended already
        psutil.Process(pid).ionice(psutil.IOPRIO_CLASS_BE, 7)
