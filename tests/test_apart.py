"""What serves many of torch's stores in one process runs in a process of its own, as an agent does.

In the long life of a test worker, beside stores and process groups that other tests have left, torch may abort.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

APART = Path(__file__).parent / "apart"


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("file", sorted(each.name for each in APART.glob("test_*.py")))
def test_in_a_process_of_its_own(file: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(APART / file)]
    done = subprocess.run(
        command, cwd=APART.parents[1], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
