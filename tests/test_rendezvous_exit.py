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
    from ftrun.rendezvous import line

    # Nobody listens there, and torch tries again for a second or so whether it is waited for or not.
    with contextlib.suppress(line.LineDown):
        line.Line("127.0.0.1", 1, "a-line", 0.05).open(look=False)
    assert not line.settle(0.0)
    atexit.register(print, "the last words")
    sys.argv = ["ftrun", "--version"]
    main()
"""


@pytest.mark.slow
def test_a_thread_that_torch_holds_aborts_no_launcher() -> None:
    command = [sys.executable, "-c", textwrap.dedent(_LAUNCHER)]
    env = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("ftrun ")
    assert done.stdout.endswith("the last words\n")
