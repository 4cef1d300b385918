"""What a hostile world does to whole runs: nothing hangs, nothing that was committed is lost, and the user is told."""

from __future__ import annotations

import random
import re
import shutil
import signal
from typing import TYPE_CHECKING

import pytest
from conftest import SCRIPTS, eventually
from test_break_engine import keepers, kill_everything

from ftrun import events
from ftrun.checkpoint import reader
from ftrun.checkpoint.keeper.faults import VARIABLE
from ftrun.checkpoint.layout import Root, rank_json
from ftrun.checkpoint.memory.tier import Tier

if TYPE_CHECKING:
    from conftest import Runner

    from ftrun.checkpoint.memory.tier import Slot
    from ftrun.checkpoint.records import Seal

LATE = """
import sys, time, torch, ftrun

with ftrun.Session.open(every=2) as ft:
    ft.track(model=torch.nn.Linear(2, 1))
    while ft.step < 2:
        ft.step_end()
        if ft.should_save():
            ft.save()
    if ft.rank == 1:
        time.sleep(2.0)  # rank 0 has long heard that this is committed, and left
"""


@pytest.mark.slow
def test_a_rank_that_is_late_to_hear_of_the_last_commit_hears_of_it(runner: Runner) -> None:
    (runner.cwd / "late.py").write_text(LATE)
    result = runner.python(
        "-m", "torch.distributed.run", "--nproc-per-node", "2", "late.py", env={"FTRUN_RUN_DIR": "here"}
    )
    assert result.code == 0, result


@pytest.mark.slow
def test_a_snapshot_whose_record_rotted_in_memory_gives_way_to_an_older_checkpoint(runner: Runner) -> None:
    tier = Tier.of(runner.run_dir("rot").path, 0)
    command = ("--nproc", "1", "--name", "rot", SCRIPTS / "sealed.py", "--total", "24")
    started = runner.start(*command, "--pause", "0.3", env={VARIABLE: "draining@2:hang"})
    root = Root.open(runner.run_dir("rot").checkpoints)
    eventually(lambda: any(each.status == "committed" for each in reader.attempts(root)), 90, "a first commit")
    eventually(lambda: newest(tier, above=4), 60, "a later snapshot")
    kill_everything(started, tier)
    found = newest(tier, above=4)  # until it was killed it may have taken another one
    assert found is not None
    slot, seal = found
    content = bytearray(slot.record.read_bytes())
    content[len(content) // 2] ^= 1
    slot.record.write_bytes(content)

    result = runner.run(*command, "--pause", "0")
    assert result.code == 0, result
    assert re.search(rf"{rank_json(0)} .*checksum", result.err)  # as a snapshot, or committed meanwhile
    first, second = (each.event.resume_step for each in started_attempts(runner, "rot")[1:])
    assert first == seal.step > second > 0


def newest(tier: Tier, *, above: int) -> tuple[Slot, Seal] | None:
    """A snapshot that is sealed and isn't safe elsewhere yet."""
    found = [(slot, seal) for slot, seal in tier.sealed() if seal.step > above]
    waiting = [(slot, seal) for slot, seal in found if not slot.is_marked(slot.drained, seal.attempt)]
    return max(waiting, key=lambda each: each[1].step) if waiting else None


def started_attempts(runner: Runner, name: str) -> list[events.Record]:
    return [each for each in runner.events(name) if isinstance(each.event, events.AttemptStarted)]


# --- run directories that were moved or copied


@pytest.mark.slow
def test_a_copied_run_directory_is_asked_about_its_own_checkpoints(runner: Runner) -> None:
    """Of the original's, ``ckpt verify`` would vouch for the wrong bytes, and ``ckpt prune`` delete them."""
    assert runner.run("--nproc", "1", "--name", "one", SCRIPTS / "small.py", "--total", "6").code == 0
    mine = runner.cwd / "runs" / "one"
    copied = runner.cwd / "runs" / "two"
    shutil.copytree(mine, copied)  # links become what they lead to, as with many ways to copy
    (shard,) = copied.glob("checkpoints/ckpt/*-s0000000006-*/r00000.0.safetensors")
    shard.write_bytes(bytes(shard.stat().st_size))
    found = runner.run("ckpt", "verify", copied)
    assert found.code == 1, found
    assert "r00000.0.safetensors chunk 0" in found.out
    assert runner.run("ckpt", "verify", mine).code == 0


@pytest.mark.slow
def test_a_damaged_manifest_is_not_passed_over_in_silence(runner: Runner) -> None:
    assert runner.run("--nproc", "1", "--name", "one", SCRIPTS / "small.py", "--total", "6").code == 0
    (manifest,) = runner.run_dir("one").checkpoints.glob("ckpt/*-s0000000006-*/MANIFEST.json")
    manifest.write_bytes(b"")
    found = runner.run("ckpt", "verify", "one")
    assert found.code == 1, found
    assert f"{manifest.parent.name}   DAMAGED\n  MANIFEST.json" in found.out
    assert "   whole: " in found.out


# --- who asks for the end again and again


@pytest.mark.slow
def test_a_third_ctrl_c_does_not_wait_for_the_storage(runner: Runner) -> None:
    command = ("--nproc", "1", "--name", "hasty", SCRIPTS / "sealed.py", "--total", "100")
    patient = ("--set", "signals.grace=10m", *command, "--pause", "0.3")
    started = runner.start(*patient, env={VARIABLE: "draining:hang"})
    tier = Tier.of(runner.run_dir("hasty").path, 0)
    eventually(tier.sealed, 90, "a snapshot, which will never be drained")
    started.process.send_signal(signal.SIGINT)
    eventually(lambda: "once more ends it at once" in started.err.read_text(), 60, "the first is heard")
    started.process.send_signal(signal.SIGINT)
    eventually(lambda: "stopped without a last save" in started.err.read_text(), 60, "the second is heard")
    started.process.send_signal(signal.SIGINT)
    result = started.wait(60)
    assert result.code in (75, 130), result
    assert "Traceback" not in result.err
    for each in keepers(tier):  # one that hangs would keep the next one waiting
        each.kill()
    again = runner.run(*command, "--pause", "0")
    assert again.code == 0, again
    assert "resumes from step" in again.err


# --- more than one way to be parallel

SHARDED = """
import sys, time, torch, ftrun
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.randn(16) + index / 32

@ftrun.entrypoint(every=3)
def main(ft):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 1))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = ft.loader(Noise(), global_batch=8, shuffle=True)
    ft.track(model=net, optimizer=optimizer)
    for batch in ft.steps(loader, total=24):
        parts = [torch.empty_like(batch) for _ in range(2)]
        dist.all_gather(parts, batch, group=mesh["tp"].get_group())
        loss = net(torch.cat(parts)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if ft.rank == 0:
            with open(sys.argv[1], "a") as curve:
                print(ft.step + 1, loss.item().hex(), file=curve)

main()
"""


@pytest.mark.slow
def test_sharded_and_tensor_parallel_at_once_repeats_its_losses_after_a_kill(runner: Runner) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    kill = f"{{at_step: {draw.randrange(5, 24)}, rank: {draw.randrange(4)}, do: kill}}"
    (runner.cwd / "sharded.py").write_text(SHARDED)
    (runner.cwd / "job.yaml").write_text(
        f"name: killed\nscript: sharded.py\nargs: [killed.txt]\nfaults: [{kill}]\n"
        "restart: {backoff: {first: 10ms}}\n"
    )
    calm = runner.run("--nproc", "4", "--name", "calm", "sharded.py", "calm.txt")
    killed = runner.run("-c", "job.yaml", "--nproc", "4")
    assert (calm.code, killed.code) == (0, 0), killed
    expected, seen = (
        [line.split() for line in (runner.cwd / f"{name}.txt").read_text().splitlines()] for name in ("calm", "killed")
    )
    assert len(started_attempts(runner, "killed")) == 2
    assert len(expected) == 24
    assert {tuple(each) for each in seen} == {tuple(each) for each in expected}
