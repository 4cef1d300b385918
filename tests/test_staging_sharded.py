"""Overlap with DTensors, and the whole way from live state to a checkpoint with a real keeper."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from conftest import Runner, eventually
from staging_kit import HeldBack, raw

from ftrun import events
from ftrun.checkpoint import epochs, layout, reader, state
from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.keeper.process import Keeper
from ftrun.checkpoint.memory.tier import Tier
from ftrun.checkpoint.plan.encoding import Encoding
from ftrun.checkpoint.plan.planner import Planner
from ftrun.checkpoint.records import RankRecord
from ftrun.checkpoint.staging.trust import TRIALS, Owned, Versions
from ftrun.contract import WorkerContract
from ftrun.session.place import Place
from ftrun.session.saving import Saver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 64))
    fully_shard(net, mesh=dist.init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        net(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return net, optimizer, step


@pytest.mark.usefixtures("alone")
def test_counters_of_sharded_parameters() -> None:
    net, optimizer, _ = sharded()
    parameter = net[0].weight
    stored = net.state_dict()["0.weight"].detach()
    assert Owned([optimizer]).owner(stored) is parameter
    changes: list[Callable[[], Any]] = [
        lambda: parameter.add_(1),
        lambda: parameter.to_local().add_(1),
        lambda: stored.mul_(2),
        lambda: net.load_state_dict({name: each.clone() for name, each in net.state_dict().items()}),
    ]
    for change in changes:
        versions = Versions()
        assert versions.watch("weight", parameter, stored._local_tensor)
        assert versions.changed() == set()
        with torch.no_grad():
            change()
        assert versions.changed() == {"weight"}


class Sharded:
    """A loop that saves sharded state, by hand or as a Session does it."""

    def __init__(self, directory: Path, *, as_a_session: bool) -> None:
        self.net, self.optimizer, self.step = sharded()
        self._encoding = Encoding() if as_a_session else None
        self._planner, self._saves = Planner(0, 1, None), 0
        self.slot = HeldBack(directory)
        self.slot.stager.watch([self.optimizer])

    def save(self, before_the_step: Callable[[], object] = lambda: None) -> tuple[int, set[str]]:
        """Save and step; how many tensors were waited for, and which are torn. What isn't is what it was."""
        self._saves += 1
        net = self.net.state_dict(keep_vars=self._encoding is not None)
        value = {"tracked": {"net": net, "optimizer": self.optimizer.state_dict()}}
        encoded = self._encoding.encode(value) if self._encoding is not None else state.encode(value)
        boundary = {name: raw(getattr(each, "_local_tensor", each)) for name, each in encoded.tensors.items()}
        plan = self._planner.plan(encoded, {"net": self.net, "optimizer": self.optimizer}, self._saves)
        late = self.slot.stage(plan, encoded)
        before_the_step()
        torn, content = self.slot.step(self.step)
        for each in plan.copies if not torn else ():
            start = each.piece.offset
            assert content[start : start + each.tensor.nbytes] == boundary[each.name], (self._saves, each.name)
        return len(late), torn


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("as_a_session", [False, True])
def test_sharded_state_overlaps_and_stays_what_it_was(tmp_path: Path, as_a_session: bool) -> None:
    loop = Sharded(tmp_path, as_a_session=as_a_session)
    late = [loop.save() for _ in range(TRIALS + 2)]
    assert late[:TRIALS] == [(0, set())] * TRIALS
    assert all(count >= 6 and not torn for count, torn in late[TRIALS:]), "weights and their averages"
    loop.slot.close()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("how", ["the whole", "the part here"])
def test_a_write_to_sharded_state_before_it_is_copied_is_seen(tmp_path: Path, how: str) -> None:
    loop = Sharded(tmp_path, as_a_session=True)
    for _ in range(TRIALS):
        loop.save()
    weight: Any = loop.net[0].weight

    def write() -> None:
        with torch.no_grad():  # of nothing, so that no word of it tells
            (weight if how == "the whole" else weight._local_tensor).add_(0)

    assert loop.save(write)[1] == {"tracked/net/0.weight"}
    assert loop.save()[1] == set()
    loop.slot.close()


@pytest.mark.usefixtures("alone")
def test_a_write_to_the_part_here_is_seen_where_the_state_has_another_view_of_it(tmp_path: Path) -> None:
    loop = Sharded(tmp_path, as_a_session=True)
    state_dict, weight = loop.net.state_dict, loop.net[0].weight
    loop.net.state_dict = lambda **_: state_dict()  # type: ignore[method-assign]  # detached, as a class of its own has it
    for _ in range(TRIALS + 1):
        loop.save()

    def write() -> None:
        with torch.no_grad():
            weight.to_local().add_(0)

    assert loop.save(write)[1] == {"tracked/net/0.weight"}
    loop.slot.close()


@pytest.mark.usefixtures("alone")
def test_state_that_is_spread_otherwise_is_not_taken_for_the_same() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, part, encoding = dist.init_device_mesh("cpu", (1,)), torch.ones(4, 4), Encoding()

    def token(*placements: Any) -> object:
        found = encoding.encode({"x": DTensor.from_local(part, mesh, placements, run_check=False)}).alike
        assert found is not None
        return found.token

    first = token(Shard(0))
    assert token(Shard(0)) is first
    assert token(Shard(1)) is not first
    assert token(Replicate()) is not first


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[2])
from test_staging_sharded import contract_of, train
saver, model, step = train(contract_of(Path(sys.argv[1])))
for number in range(1, 5):
    step()
    saver.save(number, 9, "interval", model, {"step": number})
    # the last one is killed the moment after it sealed
    while not any(seal.step == number for _, seal in saver._tier.sealed()):
        if number < 4:
            step_done = saver.poll()
        time.sleep(0.002)
    if number < 4:
        saver.wait(60)
torch.save([each.detach().clone() for each in model()["tracked"]["net"].values()], Path(sys.argv[1]) / "expected.pt")
os.kill(os.getpid(), signal.SIGKILL)
"""


def contract_of(directory: Path) -> WorkerContract:
    return WorkerContract(
        run_dir=str(directory),
        run_id="run",
        root=str(directory / "root"),
        attempt=1,
        epoch=1,
        resume=None,
        node=0,
        worker_dir=str(directory),
        tier=str(Tier.of(directory, 0).path),
    )


def train(contract: WorkerContract) -> tuple[Saver, Callable[[], dict[str, Any]], Callable[[], None]]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(64, 700), torch.nn.BatchNorm1d(700), torch.nn.Linear(700, 700))
    optimizer = torch.optim.AdamW(net.parameters())
    saver = Saver(Place(), contract, events.EventLog(Path(contract.run_dir) / "events.jsonl"), None)
    saver.watch({"net": net, "optimizer": optimizer})

    def step() -> None:
        net(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def collect() -> dict[str, Any]:
        return {"tracked": {"net": net.state_dict(), "optimizer": optimizer.state_dict()}}

    return saver, collect, step


@pytest.mark.slow
def test_a_worker_that_is_killed_after_its_seal_loses_nothing(tmp_path: Path, runner: Runner) -> None:
    contract = contract_of(tmp_path)
    root = layout.Root.open(contract.root)
    record = epochs.claim(root, "run", fresh=False, parent=None)
    tier = Tier(Path(contract.tier))
    keeper = Keeper(tier, KeeperConfig(str(tmp_path), "run", contract.root, {}, "", 0, 3, None, None, 0))
    keeper.begin_epoch(record)
    keeper.ensure()
    try:
        result = runner.python("-c", SCRIPT, tmp_path, Path(__file__).parent)
        assert result.code == -signal.SIGKILL, result
        commit = eventually(lambda: reader.latest(root, "run", since=0).commit, 60, "the commit")
        assert commit is not None
        eventually(lambda: reader.latest(root, "run", since=0).commit.name.step == 4, 60, "the last commit")
        name = reader.latest(root, "run", since=0).commit.name
        record_ = RankRecord.from_bytes(root.read(layout.attempt_key(name, layout.rank_json(0))))
        content = root.read(layout.attempt_key(name, layout.rank_shard(0)))
        expected = torch.load(tmp_path / "expected.pt", weights_only=True)
        names = list(record_.tree["tracked"]["net"]["of"])
        pieces = {piece.tensor: piece for piece in record_.pieces}
        for key, tensor in zip(names, expected, strict=True):
            piece = pieces[f"tracked/net/{key}"]
            assert content[piece.offset : piece.offset + tensor.nbytes] == raw(tensor), key
    finally:
        assert keeper.finish(60)
    assert not tier.path.exists()
