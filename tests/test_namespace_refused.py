"""Launchers that can't take part, or find nobody: they say what is wrong, by name, and leave with the right code."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import eventually, forget_memory
from namespaces import Net
from namespaces.job import Job
from namespaces.skipping import NET

from ftrun.contract import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, NET]

FTRUN = Path(sys.executable).with_name("ftrun")
WAITS = "import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(120)\n"
SOMETHING_ELSE = """
import socket
with socket.create_server(("", 29500)) as server:
    print("listening", flush=True)
    while True:
        connection = server.accept()[0]
        connection.recv(1000)
        connection.sendall(b"HTTP/1.0 400 Bad Request\\r\\n\\r\\n")
        connection.close()
"""


@pytest.fixture(autouse=True)
def _memory(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "train.py").write_text(WAITS)
    yield
    forget_memory(tmp_path)


def job(net: Net, folder: Path, *more: str, where: str = "node1:29400", run_id: str = "job", nproc: int = 1) -> Job:
    """A job of two nodes, which one of them may start otherwise than the other."""
    meet = ("--nnodes", "2", "--nproc", str(nproc), "--rdzv-endpoint", where, "--rdzv-id", run_id)
    return Job(net, [FTRUN, "--set", "standby.enabled=false", "--name", "job", *meet, *more, "train.py"], folder)


def installed(folder: Path, package: str, version: str) -> dict[str, str]:
    """The environment of a node on which a package is installed in another version."""
    place = folder / f"{package}-{version}"
    metadata = place / f"{package}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return {"PYTHONPATH": str(place)}


def test_nodes_that_do_not_belong_together_are_refused_by_name(tmp_path: Path) -> None:
    with Net(7) as net:
        first = job(net, tmp_path)
        first.start(1)
        assert first.until((tmp_path / "runs/job/rendezvous/leader.json").exists), first.told()
        others = [
            (job(net, tmp_path, run_id="alone"), {}, "is the endpoint of another run, 'job', and this is 'alone'"),
            (job(net, tmp_path, nproc=2), {}, "the number of workers (--nproc) is 2 on node3 and 1 on node1"),
            (job(net, tmp_path), installed(tmp_path, "torch", "2.12.9"), "torch is 2.12.9 on node4 and "),
            (job(net, tmp_path), installed(tmp_path, "ftrun", "9.9"), "ftrun is 9.9 on node5 and "),
            (job(net, tmp_path, "--set", "restart.no_progress=9"), {}, "section 'restart' of the job file is "),
            (job(net, tmp_path), {}, "the mark in the run directory, which all nodes have to share"),
        ]
        # Each node has a directory of its own under the common name.
        net.node(7).run("mount", "-t", "tmpfs", "tmpfs", tmp_path / "runs")
        for number, (other, changed, _) in enumerate(others, 2):
            other.start(number, changed=changed)
        for number, (other, _, reason) in enumerate(others, 2):
            assert other.launchers[number].wait(60) == ExitCode.USAGE, other.told()
            said = " ".join(other.told().split())
            assert reason in said, said
            assert "Traceback" not in said
        assert first.launchers[1].poll() is None
        first.launchers[1].kill()
        assert not (tmp_path / "began").exists()


def test_an_endpoint_that_is_no_rendezvous_is_named(tmp_path: Path) -> None:
    with Net(3) as net:
        server = net.node(3).start(sys.executable, "-S", "-c", SOMETHING_ELSE)
        nobody = job(net, tmp_path, "--rdzv-conf", "join_timeout=3", where="node3:29400")
        nobody.start(1)
        other = job(net, tmp_path, "--rdzv-conf", "join_timeout=3", "--name", "other", where="node3:29500")
        eventually(lambda: "listening" in server.text())
        other.start(2)
        for made, number, where in ((nobody, 1, "node3:29400"), (other, 2, "node3:29500")):
            assert made.launchers[number].wait(60) == ExitCode.FAILED, made.told()
            said = " ".join(made.told().split())
            assert f"no rendezvous was reached at {where} within 3 s" in said, said
            assert "Traceback" not in said
        assert "onnection refused" in nobody.told()


def test_too_few_nodes_wait_for_another_and_leave_to_be_run_again(tmp_path: Path) -> None:
    with Net(2) as net:
        # The one that stays has little patience, and comes where somebody is already.
        host = job(net, tmp_path, where="node2:29400")
        host.start(2)
        assert host.until((tmp_path / "runs/job/rendezvous/leader.json").exists), host.told()
        stays = job(net, tmp_path, "--rdzv-conf", "join_timeout=4", where="node2:29400")
        for _ in range(3):  # a busy machine may use up its patience before it has met the other one
            stays.start(1)
            if stays.until((tmp_path / "began").exists):
                break
        assert (tmp_path / "began").exists(), host.told() + stays.told()
        began = time.monotonic()
        net.node(2).power_off()
        assert stays.launchers[1].wait(60) == ExitCode.TRY_AGAIN, stays.told()
        print(f"too few nodes are left: one waits and leaves after {time.monotonic() - began:.2f} s")
        assert "The same command goes on when there are enough." in " ".join(stays.told().split())
