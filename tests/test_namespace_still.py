"""A node whose run directory is on a file server that is gone: the others go on without it, and it leaves by itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import slow_mount
from hung_mount import HungMount
from namespaces import Net
from namespaces.job import Job
from namespaces.skipping import NET, must_run
from namespaces.story import SILENT, Story, command, environment

from ftrun.contract import ExitCode

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    NET,
    pytest.mark.skipif(not must_run() and bool(slow_mount.why_not()), reason=slow_mount.why_not() or "-"),
]


def test_a_launcher_that_hangs_in_the_file_system_does_not_hold_up_the_others(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    root = ("--set", f"checkpoint.root={real / 'checkpoints'}")
    # The workers themselves have nothing to do with that directory, and would go on for ever.
    with HungMount(real, tmp_path / "mount") as mount, Net(3) as net:
        # None passes for lost because this machine was busy: they are heard all the time.
        train = command("2:3", SILENT, "--out", tmp_path, conf=",stall_timeout=4,lost_timeout=60")
        job = Job(net, train, tmp_path, environment(tmp_path))
        job.start(1, 3, more=("--run-dir", str(real / "run"), *root))
        job.start(2, more=("--run-dir", str(mount.path / "run"), *root))
        story = Story(job, 1, 2, 3)
        since = time.monotonic()
        mount.hang()
        story.goes_on("a launcher hangs in the file system", since, 1, 3)
        left = job.until(lambda: "it leaves with exit code 75" in job.launchers[2].text())
        print(f"it leaves after {time.monotonic() - since:.2f} s")
        mount.go_on()  # a request that the server had begun with keeps even a process that has ended
        assert (left, job.launchers[2].wait(30.0)) == (True, ExitCode.TRY_AGAIN), job.told()
        told = job.launchers[2].text()
        assert "the launcher has stood still for" in told
        assert f" on {mount.path}/run/" in told
        assert "the workers here are ended" in told
        others = job.launchers[1].text() + job.launchers[3].text()
        # And where, if the thread that knows it got a processor in time: see test_main_thread.py.
        assert "the launcher on node2 stands still" in others
        job.finish()
        assert [job.launchers[number].wait(30.0) for number in (1, 3)] == [0, 0]
