"""How a launcher ends while a thread of its own is in a call to a store of torch's."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

_LAUNCHER = """
    import atexit, contextlib, sys
    from ftrun.__main__ import main
    from ftrun.cli import app  # now: the thread below is held for a second or so
    from ftrun.rendezvous import line

    # Nobody listens there, and torch tries again for a second or so whether it is waited for or not.
    with contextlib.suppress(line.LineDown):
        line.Line("127.0.0.1", 1, "a-line", 0.05).open(look=False)
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
