"""Saves from a Session's side, with a keeper played by hand: seals, slots, outcomes, and what goes wrong."""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import eventually
from safetensors.torch import load_file

from ftrun import events
from ftrun.checkpoint import state
from ftrun.checkpoint.checksums import record_of
from ftrun.checkpoint.layout import AttemptName
from ftrun.checkpoint.memory.outcomes import Outcome, Outcomes
from ftrun.checkpoint.memory.tier import Slot, Tier
from ftrun.checkpoint.records import RankRecord, Seal
from ftrun.checkpoint.staging.slots import Held, choose, choose_to_replace
from ftrun.contract import WorkerContract
from ftrun.errors import AgreementTimeout, CheckpointError, NotStorable
from ftrun.session import saving
from ftrun.session.place import Place
from ftrun.session.saving import Saver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass
class Scene:
    """A worker that saves, and what its node's keeper would see."""

    tier: Tier
    contract: WorkerContract
    log: events.EventLog
    events: Path
    made: list[Saver]

    def saver(self, **changes: Any) -> Saver:
        made = Saver(Place(), replace(self.contract, **changes), self.log, None)
        self.made.append(made)
        return made

    def sealed(self) -> dict[int, tuple[Slot, Seal]]:
        return {seal.step: (slot, seal) for slot, seal in self.tier.sealed()}

    def wait_for_seal(self, step: int) -> tuple[Slot, Seal]:
        found = eventually(lambda: self.sealed().get(step), 60, f"the seal of step {step}")
        assert isinstance(found, tuple)
        return found

    def drain(self, step: int) -> str:
        slot, seal = self.wait_for_seal(step)
        slot.mark(slot.drained, seal.attempt)
        return seal.attempt

    def commit(self, step: int, *, reason: str = "", differ: tuple[str, ...] = ()) -> str:
        attempt = self.drain(step)
        Outcomes(self.tier).put(
            Outcome(attempt, step, committed=not reason, reason=reason, seconds=0.25, size=7, differ=differ)
        )
        return attempt

    def told(self) -> list[events.Saved]:
        found = (each.event for each in events.read(self.events))
        return [each for each in found if isinstance(each, events.Saved)]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    tier = Tier(tmp_path / "shm" / "user" / "tier")
    contract = WorkerContract(
        run_dir=str(tmp_path / "run"),
        run_id="run",
        root=str(tmp_path / "root"),
        attempt=4,
        epoch=7,
        resume="e00000006-s0000000001-00000000",
        node=0,
        worker_dir=str(tmp_path),
        tier=str(tier.path),
    )
    made = Scene(tier, contract, events.EventLog(tmp_path / "events.jsonl"), tmp_path / "events.jsonl", [])
    yield made
    for each in made.made:
        each.close(60)


class Model:
    """Something to save: a module and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.step()

    def step(self) -> None:
        self.net(torch.randn(4, 64)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def collect(self) -> dict[str, Any]:
        return {
            "tracked": {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()},
            "random": {"torch": torch.get_rng_state()},
            "extra": {"note": ("kept", 3)},
        }

    def watched(self) -> dict[str, Any]:
        return {"net": self.net, "optimizer": self.optimizer}


def save(saver: Saver, model: Model, step: int) -> None:
    saver.save(step, 100, "interval", model.collect, {"step": step, "loaders": {"data": {"epoch": 1}}})


def save_held(saver: Saver, model: Model, step: int) -> Callable[[], None]:
    """Save, with a helper that copies nothing until what is returned is called."""
    gate = threading.Event()
    assert saver._stager.settle(60)
    saver._stager.in_background(lambda: gate.wait(60) and None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver._stager, "settle", lambda _timeout: True)  # else the save would wait for the gate
        save(saver, model, step)
    return gate.set


def test_a_seal_says_it_all(scene: Scene) -> None:
    model, saver = Model(), scene.saver()
    saver.watch(model.watched())
    expected = state.encode(model.collect())
    expected = replace(expected, tensors={name: each.clone() for name, each in expected.tensors.items()})
    save(saver, model, 12)
    model.step()
    slot, seal = scene.wait_for_seal(12)
    name = AttemptName.parse(seal.attempt)
    assert name is not None
    assert (name.epoch, name.step) == (7, 12)
    assert (seal.rank, seal.world_size, seal.node, seal.node_ranks) == (0, 1, 0, (0,))
    assert (seal.run_id, seal.total, seal.reason, seal.parent, seal.run_attempt) == (
        "run",
        100,
        "interval",
        scene.contract.resume,
        4,
    )
    assert seal.data == {"step": 12, "loaders": {"data": {"epoch": 1}}}
    paths = {file: path for file, (path, _) in seal.files.items()}
    assert paths == {"r00000.json": str(slot.record), "r00000.0.safetensors": str(slot.payload)}
    assert all(record_of(Path(path).read_bytes()) == record for path, record in seal.files.values())
    record = RankRecord.from_bytes(slot.record.read_bytes())
    assert (record.attempt, record.step, record.total, record.data) == (seal.attempt, 12, 100, seal.data)
    assert record.tree == expected.tree
    content = slot.payload.read_bytes()
    for piece in record.pieces:
        tensor = expected.tensors[piece.tensor].reshape(-1).view(torch.uint8)
        assert content[piece.offset : piece.offset + tensor.numel()] == tensor.numpy().tobytes(), piece.tensor
    whole = load_file(slot.payload)
    assert torch.equal(whole["tracked/net/0.weight"], expected.tensors["tracked/net/0.weight"])
    (told,) = eventually(scene.told, 60, "the word of it")
    assert (told.step, told.reason, told.size) == (12, "interval", slot.payload.stat().st_size)
    assert told.seconds > 0


def test_a_seal_vouches_for_bytes_that_were_copied_late(scene: Scene) -> None:
    model, saver = Model(), scene.saver()
    saver.watch(model.watched())
    for step in (1, 2):
        save(saver, model, step)
        model.step()
        scene.commit(step)
    release = save_held(saver, model, 3)
    later = saver._stager._pending._later  # type: ignore[union-attr]
    assert len(later), "some of it is copied beside training"
    scene_seals = [seal.step for _, seal in scene.tier.sealed()]
    model.step()
    assert 3 not in scene_seals
    assert 3 not in [seal.step for _, seal in scene.tier.sealed()], "not before all is copied"
    release()
    _, seal = scene.wait_for_seal(3)
    assert len(seal.files) == 2
    for path, record in seal.files.values():
        assert record_of(Path(path).read_bytes()) == record


def test_commits_are_heard(scene: Scene) -> None:
    model, saver = Model(), scene.saver()
    assert saver.stall_seconds is None
    assert saver.commit_seconds is None
    save(saver, model, 1)
    assert saver.stall_seconds is not None
    assert saver.poll() == []
    attempt = scene.commit(1)
    (checkpoint,) = eventually(saver.poll, 60, "the commit")
    assert (checkpoint.step, checkpoint.name, checkpoint.root, checkpoint.total, checkpoint.reason) == (
        1,
        attempt,
        scene.contract.root,
        100,
        "interval",
    )
    assert saver.commit_seconds == 0.25
    assert saver.poll() == []
    saver.wait(0)


def test_waiting(scene: Scene) -> None:
    model, saver = Model(), scene.saver()
    saver.wait(0)
    save(saver, model, 1)
    with pytest.raises(AgreementTimeout, match=r"e00000007-s0000000001-.*is not committed after"):
        saver.wait(0.05)
    thread = threading.Timer(0.1, lambda: scene.commit(1))
    thread.start()
    saver.wait(60)
    assert [each.step for each in saver.poll()] == [1], "what was heard while waiting is still news"


def test_a_commit_that_failed(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    model, saver = Model(), scene.saver()
    distrusted: list[str] = []
    saver._open._distrust = distrusted.extend
    save(saver, model, 1)
    scene.commit(1, reason="no room on the root", differ=("tracked/net/0.bias",))
    with pytest.raises(CheckpointError, match=r"was not committed: no room on the root"):
        saver.wait(60)
    assert distrusted == ["tracked/net/0.bias"]
    assert "training goes on" in caplog.text
    save(saver, model, 2)
    scene.commit(2)
    saver.wait(60)


def test_names_are_new_for_each_save(scene: Scene) -> None:
    model, saver = Model(), scene.saver()
    save(saver, model, 5)
    first = scene.commit(5)
    saver.wait(60)
    save(saver, model, 5)
    assert saver._stager.settle(60)
    names = {seal.attempt for _, seal in scene.tier.sealed()}
    assert len(names) == 2
    assert first in names


def test_of_a_step_that_is_saved_again_the_later_name_is_the_newer(scene: Scene) -> None:
    model, saver = Model(), scene.saver()
    names: list[str] = []
    for _ in range(4):
        save(saver, model, 5)
        assert saver._stager.settle(60)
        names += {seal.attempt for _, seal in scene.tier.sealed()} - {*names}
        for slot, seal in scene.tier.sealed():
            slot.mark(slot.drained, seal.attempt)
    assert len(names) == 4
    assert [*map(AttemptName.of, names)] == sorted(map(AttemptName.of, names))


def test_skip(scene: Scene) -> None:
    model, saver = Model(), scene.saver()
    for step in (1, 2):
        assert saver.may_save()
        save(saver, model, step)
        scene.wait_for_seal(step)
    assert not saver.may_save()
    scene.drain(1)
    assert saver.may_save()
    save(saver, model, 3)
    scene.wait_for_seal(3)
    assert set(scene.sealed()) == {2, 3}, "the oldest gave way"


def test_a_slot_that_is_being_filled_is_not_free(scene: Scene) -> None:
    model, saver = Model(), scene.saver()
    save(saver, model, 1)
    scene.wait_for_seal(1)
    release = save_held(saver, model, 2)
    assert not saver.may_save()
    release()


@pytest.mark.parametrize("policy", ["wait", "skip"])
def test_a_save_that_somebody_insists_on_waits(scene: Scene, policy: str) -> None:
    model, saver = Model(), scene.saver(when_busy=policy)
    for step in (1, 2):
        save(saver, model, step)
        scene.wait_for_seal(step)
    assert saver.may_save() == (policy == "wait")
    threading.Timer(0.1, lambda: scene.drain(1)).start()
    save(saver, model, 3)
    scene.wait_for_seal(3)
    assert set(scene.sealed()) == {2, 3}


def test_waiting_for_a_slot_has_an_end(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving, "_SLOT_SECONDS", 0.05)
    model, saver = Model(), scene.saver()
    for step in (1, 2):
        save(saver, model, step)
        scene.wait_for_seal(step)
    save(saver, model, 3)
    assert "found no empty slot" in caplog.text
    assert set(scene.sealed()) == {1, 2}
    (failed,) = (each for each in Outcomes(scene.tier).poll() if each.step == 3)
    assert not failed.committed
    scene.commit(1)
    scene.commit(2)
    with pytest.raises(CheckpointError, match="found no empty slot"):
        saver.wait(60)


def test_replace(scene: Scene) -> None:
    model, saver = Model(), scene.saver(when_busy="replace")
    for step in (1, 2):
        save(saver, model, step)
        scene.wait_for_seal(step)
    first, seal = scene.sealed()[1]
    first.mark(first.draining, seal.attempt)
    assert saver.may_save()
    save(saver, model, 3)
    scene.wait_for_seal(3)
    assert set(scene.sealed()) == {1, 3}, "the one that is being read stays, the one that waits gives way"
    (failed,) = Outcomes(scene.tier).poll()
    assert (failed.step, failed.committed) == (2, False)
    assert "took its place" in failed.reason
    scene.commit(1)
    scene.commit(3)
    saver.wait(60)


def test_what_an_earlier_attempt_left(scene: Scene) -> None:
    model = Model()
    before = scene.saver(epoch=6)
    for step in (1, 2):
        save(before, model, step)
        scene.wait_for_seal(step)
    before.close(60)
    saver = scene.saver()
    saver.prepare(model.collect)
    assert not saver.may_save(), "the keeper drains them first"
    assert set(scene.sealed()) == {1, 2}
    _, seal = scene.sealed()[1]
    Outcomes(scene.tier).put(Outcome(seal.attempt, 1, committed=False, reason="incomplete", seconds=0, size=0))
    assert saver.may_save(), "what will never be committed holds no slot"
    save(saver, model, 3)
    scene.wait_for_seal(3)
    assert set(scene.sealed()) == {2, 3}


def test_memory_is_prepared_in_the_size_of_the_state(scene: Scene) -> None:
    model, saver = Model(), scene.saver()
    saver.watch(model.watched())
    saver.prepare(model.collect)
    assert saver._stager.settle(60)
    slots = scene.tier.slots(0)
    sizes = [slot.payload.stat().st_size for slot in slots]
    assert sizes[0] == sizes[1] > 64 * 256 * 4 * 6
    save(saver, model, 1)
    scene.wait_for_seal(1)
    assert [slot.payload.stat().st_size for slot in slots] == sizes


def test_a_torn_snapshot_is_dropped_and_said(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    model, saver = Model(), scene.saver()
    saver.watch(model.watched())

    def commit(step: int) -> None:
        save(saver, model, step)
        model.step()
        scene.commit(step)
        saver.wait(60)

    commit(1)
    commit(2)
    release = save_held(saver, model, 3)
    with torch.no_grad():
        model.net[0].weight.add_(1)
    release()
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match=r"tracked/net/0\.weight.*changed"):
        saver.wait(60)
    assert 3 not in scene.sealed()
    assert caplog.text.count("changed outside an optimizer step") == 1, "it is said once"
    assert [each.committed for each in Outcomes(scene.tier).poll() if each.step == 3] == [False]
    assert [each.step for each in scene.told()] == [1, 2]
    commit(4)


def test_memory_that_can_not_be_had(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ftrun.checkpoint.memory.slot_memory._allocate", full)
    model, saver = Model(), scene.saver()
    save(saver, model, 1)
    with pytest.raises(CheckpointError, match="No space left"):
        saver.wait(60)
    monkeypatch.undo()
    save(saver, model, 2)
    scene.commit(2)
    saver.wait(60)


def test_a_save_that_is_broken_off_has_an_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> None:
        raise MemoryError

    model, saver = Model(), scene.saver()
    with monkeypatch.context() as patch:
        patch.setattr("ftrun.checkpoint.memory.slot_memory._allocate", out_of_memory)
        with pytest.raises(MemoryError):
            save(saver, model, 1)
    with pytest.raises(CheckpointError, match="broken off: MemoryError"):
        saver.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr("ftrun.session.saving.seal_slot", out_of_memory)  # on the helper's thread
        save(saver, model, 2)
        assert saver._stager.settle(60)
    with pytest.raises(CheckpointError, match="could not be written: MemoryError"):
        saver.wait(60)
    assert saver.may_save()
    save(saver, model, 3)
    scene.commit(3)
    saver.wait(60)


@pytest.mark.parametrize("data", [{"loss": float("nan")}, {"at": object()}])
def test_a_position_that_is_no_json(scene: Scene, data: dict[str, Any]) -> None:
    saver = scene.saver()
    with pytest.raises(NotStorable, match="data position can't be stored"):
        saver.save(1, None, "user", dict, data)
    with pytest.raises(CheckpointError, match="broken off: NotStorable"):
        saver.wait(60)  # nobody takes the step for saved


def test_a_position_that_moves_on(scene: Scene) -> None:
    saver, data = scene.saver(), {"loaders": {"data": {"sample": 1}}}
    saver.save(1, None, "user", lambda: {"tracked": {}}, data)
    data["loaders"]["data"]["sample"] = 2
    slot, seal = scene.wait_for_seal(1)
    assert seal.data == {"loaders": {"data": {"sample": 1}}}
    assert set(seal.files) == {"r00000.json"}, "a state without tensors has no payload"
    assert not slot.payload.exists()


def test_the_keeper_is_rung(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.tier.create()
    monkeypatch.chdir(scene.tier.path.parent)  # tests' own paths are too long for sockets
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
        bell.bind("tier/keeper.sock")
        bell.settimeout(60)
        saver = scene.saver(tier="tier")
        save(saver, Model(), 1)
        assert bell.recv(10) == b""


def test_words_agree_where_positions_do(scene: Scene) -> None:
    model, words = Model(), []
    for total in (100, 100, 101):
        saver = scene.saver()
        saver.save(3, total, "user", model.collect, {"step": 3})
        _, seal = scene.wait_for_seal(3)
        words.append(seal.word.position)
        scene.commit(3)
        saver.wait(60)
        saver.close(60)
        for slot in scene.tier.slots(0):
            slot.seal.unlink(missing_ok=True)
    assert words[0] == words[1] != words[2]


NAMES = [str(AttemptName(epoch, step, "00000000")) for epoch, step in ((1, 5), (2, 3), (2, 4))]

CHOICES: list[tuple[list[Held], int | None, int | None]] = [
    ([Held(), Held()], 0, None),
    ([Held(NAMES[0]), Held()], 1, 0),
    ([Held(NAMES[1], over=True), Held(NAMES[0], over=True)], 1, None),
    ([Held(NAMES[1], over=True), Held()], 1, None),
    ([Held(NAMES[0], over=True, draining=True), Held(NAMES[1])], None, 1),
    ([Held(NAMES[1]), Held(NAMES[2])], None, 1),
    ([Held(NAMES[2]), Held(NAMES[0])], None, 0),
    ([Held(NAMES[2], draining=True), Held(NAMES[0], draining=True)], None, None),
    ([Held(NAMES[0])], None, 0),
    ([Held("of another format", over=True), Held(NAMES[0], over=True)], 0, None),
]


@pytest.mark.parametrize(("held", "free", "replaced"), CHOICES)
def test_which_slot(held: list[Held], free: int | None, replaced: int | None) -> None:
    assert choose(held) == free
    assert choose_to_replace(held) == replaced
