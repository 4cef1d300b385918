"""How a launcher ends while a thread of its own is in a call to a store of torch's."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

_LAUNCHER = """
    import atexit, contextlib, datetime, socket, sys, threading, time
    from torch.distributed import TCPStore
    from ftrun.__main__ import main
    from ftrun.cli import app
    from ftrun.rendezvous import line

    silent = socket.create_server(("127.0.0.1", 0))  # torch waits for its answer without a limit

    class Finalized:
        # Last of all, while the interpreter ends, the thread is let go, and has the time to ask for the interpreter.
        def __del__(self, silent=silent, sleep=time.sleep):
            silent.close()
            sleep(3)

    last = Finalized()

    def held():
        second = datetime.timedelta(seconds=1)
        while True:  # one that gets no processor for a second doesn't come as far as that
            with contextlib.suppress(RuntimeError):
                TCPStore("127.0.0.1", silent.getsockname()[1], is_master=False, timeout=second, wait_for_workers=False)
    thread = threading.Thread(target=held, daemon=True)
    thread.start()
    line.leave_behind(thread)
    assert not line.settle(0.0)
    atexit.register(print, "the last words")
    sys.argv = ["ftrun", "--version"]
    if ENDS != "well":
        def fall(**_):
            raise KeyboardInterrupt if ENDS == "interrupted" else LookupError("a mistake")
        app.app = fall
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ends", "code"), [("well", 0), ("interrupted", 130), ("by a mistake", 1)])
def test_a_thread_that_torch_holds_aborts_no_launcher(ends: str, code: int) -> None:
    command = [sys.executable, "-c", f"ENDS = {ends!r}\n{textwrap.dedent(_LAUNCHER)}"]
    env = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr[-2000:]
    assert done.stdout.startswith("ftrun ") is (ends == "well")
    assert ("LookupError: a mistake" in done.stderr) is (ends == "by a mistake")
    assert done.stdout.endswith("the last words\n")
