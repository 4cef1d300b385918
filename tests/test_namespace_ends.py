"""How runs of several nodes end: one node finishes before the others, and what becomes of them decides for all."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import forget_memory
from namespaces import Net
from namespaces.job import Job
from namespaces.skipping import NET

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, NET]

FTRUN = Path(sys.executable).with_name("ftrun")
SCRIPT = """\
import os, sys, time
from pathlib import Path
rank, attempt = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
place = Path(os.environ["OUT"])
if rank == 0:
    (place / f"done-{attempt}").touch()
    sys.exit(0)
deadline = time.monotonic() + 60
while not (place / f"done-{attempt}").exists() and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(1.0)  # its peer has ended for some time
(place / f"end-{attempt}").write_text(str(time.monotonic()))
sys.exit(int(os.environ["CODES"].split(",")[attempt]))
"""
BARRIER = 100.0
"""Torch's agents wait 300 s for each other at the end."""


@pytest.fixture(autouse=True)
def _memory(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "train.py").write_text(SCRIPT)
    yield
    forget_memory(tmp_path)


def start(net: Net, folder: Path, codes: str, restarts: int, *nodes: int) -> Job:
    """A job on two nodes, in which rank 0 ends well at once, and rank 1 some time later."""
    name = f"ends-{restarts}"
    out = folder / name
    out.mkdir()
    # No launcher passes for lost because this machine was busy: that would be one attempt more.
    patient = ("--rdzv-conf", "lost_timeout=60")
    meet = ("--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", f"node{nodes[0]}:29400", "--rdzv-id", name, *patient)
    options = ("--name", name, "--set", "standby.enabled=false", "--max-restarts", str(restarts))
    job = Job(net, [FTRUN, *options, *meet, "train.py"], folder, {"OUT": str(out), "CODES": codes})
    job.start(*nodes)
    return job


def test_a_rank_that_dies_after_its_peers_have_finished_decides_for_all(tmp_path: Path) -> None:
    with Net(4) as net:
        again = start(net, tmp_path, "3,0", 1, 1, 2)  # all are started once more, and the second time all end well
        never = start(net, tmp_path, "3", 0, 3, 4)
        for job, code, last in ((again, 0, "ends-1/end-1"), (never, 3, "ends-0/end-0")):
            assert [each.wait(60) for each in job.launchers.values()] == [code, code], job.told()
            waited = time.monotonic() - float((tmp_path / last).read_text())
            print(f"{len(job.launchers)} launchers end with {code}: {waited:.2f} s after the last rank")
            assert waited < BARRIER
        assert "the run was ended by node" in never.told()
        assert (tmp_path / "ends-1/done-1").exists()
