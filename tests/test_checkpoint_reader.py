"""The reading side: names, epochs, manifests, and which checkpoint is the latest."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from storage_kit import write_attempt

from ftrun.checkpoint import epochs, reader
from ftrun.checkpoint.checksums import FileRecord
from ftrun.checkpoint.layout import LATEST, MANIFEST, AttemptName, Root, attempt_key, bad_key, rank_json, rank_shard
from ftrun.checkpoint.manifest import BadManifestError, Manifest, NewerFormatError
from ftrun.checkpoint.sealed import canonical
from ftrun.errors import CheckpointError, NoValidCheckpoint, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def save(root: Root, step: int, *, epoch: int = 1, run_id: str = "run", suffix: str = "00000000") -> AttemptName:
    name = write_attempt(root, step, epoch=epoch, run_id=run_id, suffix=suffix, world_size=1)
    root.write(LATEST, f"{name}\n".encode())
    return name


def path_of(root: Root, name: AttemptName, file: str) -> Path:
    return root.path / attempt_key(name, file)


def latest_step(root: Root, **options: Any) -> int | None:
    commit = reader.latest(root, "run", **options).commit
    return commit and commit.manifest.step


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x20
    path.write_bytes(data)


# --- names and places ---------------------------------------------------------------------------------------


@given(st.integers(0, 10**12), st.integers(0, 10**14), st.text("0123456789abcdef", min_size=8, max_size=8))
def test_names_come_back(epoch: int, step: int, suffix: str) -> None:
    name = AttemptName(epoch, step, suffix)
    assert AttemptName.parse(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "e00000007-s0000001200",
        "e7-s1200-5f1c09ab",
        "e00000007-s0000001200-5F1C09AB",
        "e000000007-s0000001200-5f1c09ab",
        "e00000007-s0000001200-5f1c09ab.tmp",
        "e00000007-s0000001200-5f1c09ab\n",
        "e0000000\u0667-s0000001200-5f1c09ab",
        "step-7",
    ],
    ids=ascii,
)
def test_other_names_are_left_alone(text: str) -> None:
    assert AttemptName.parse(text) is None
    with pytest.raises(UsageError, match="ftrun ckpt ls"):
        AttemptName.of(text)


def test_a_name_looks_as_documented() -> None:
    assert str(AttemptName(7, 1200, "5f1c09ab")) == "e00000007-s0000001200-5f1c09ab"


def test_reading_needs_no_torch() -> None:
    modules = "epochs, layout, manifest, reader, resuming, retention, records, sealed, checksums, interval, verify"
    code = (
        f"import sys; from ftrun.checkpoint import {modules}; sys.exit(bool({{'torch', 'numpy'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# --- epochs -------------------------------------------------------------------------------------------------


def test_epochs_count_up_and_inherit_their_lineage(root: Root) -> None:
    first = epochs.claim(root, "run", fresh=False, parent=None)
    second = epochs.claim(root, "run", fresh=False, parent="x")
    fresh = epochs.claim(root, "run", fresh=True, parent=None)
    fourth = epochs.claim(root, "run", fresh=False, parent=None)
    assert [(r.epoch, r.since) for r in (first, second, fresh, fourth)] == [(1, 1), (2, 1), (3, 3), (4, 3)]
    assert epochs.current(root) == fourth
    assert epochs.read(root, 2) == second
    assert (second.parent, second.pid) == ("x", os.getpid())
    assert epochs.newest(root) == 4


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b'{"epoch":3,\n"crc":"00000000"}\n', b"text"])
def test_an_unreadable_epoch_counts_but_says_nothing(root: Root, content: bytes) -> None:
    epochs.claim(root, "run", fresh=False, parent=None)
    epochs.claim(root, "run", fresh=True, parent=None)
    (root.path / "epochs" / "00000003.json").write_bytes(content)
    (root.path / "epochs" / "notes.json").write_bytes(content)
    assert epochs.current(root).epoch == 2
    record = epochs.claim(root, "run", fresh=False, parent=None)
    assert (record.epoch, record.since) == (4, 2)


def test_with_every_record_damaged_no_commit_is_lost(root: Root) -> None:
    epochs.claim(root, "run", fresh=False, parent=None)
    save(root, 5)
    (root.path / "epochs" / "00000001.json").write_bytes(b"")
    record = epochs.claim(root, "run", fresh=False, parent=None)
    assert (record.epoch, record.since) == (2, 1)
    assert latest_step(root, since=record.since) == 5


def test_a_record_under_another_number_is_unreadable(root: Root) -> None:
    epochs.claim(root, "run", fresh=False, parent=None)
    (root.path / "epochs" / "00000009.json").write_bytes((root.path / "epochs" / "00000001.json").read_bytes())
    assert epochs.current(root).epoch == 1
    assert epochs.claim(root, "run", fresh=False, parent=None).epoch == 10


def test_another_run_is_refused_unless_it_starts_afresh(root: Root) -> None:
    epochs.claim(root, "a", fresh=False, parent=None)
    with pytest.raises(UsageError, match="holds the run 'a'; this is 'b'") as caught:
        epochs.claim(root, "b", fresh=False, parent=None)
    assert "--fresh" in str(caught.value)
    assert "checkpoint.root" in str(caught.value)
    assert epochs.newest(root) == 1
    assert epochs.claim(root, "b", fresh=True, parent=None).since == 2


CLAIM = """
import sys
from ftrun.checkpoint import epochs
from ftrun.checkpoint.layout import Root
root = Root.open(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(5):
    print(epochs.claim(root, "run", fresh=False, parent=None).epoch)
"""


def test_racing_processes_never_share_an_epoch(root: Root) -> None:
    command = [sys.executable, "-c", CLAIM, str(root.path)]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()
    numbers = [int(line) for worker in workers for line in worker.communicate(timeout=60)[0].split()]
    assert sorted(numbers) == list(range(1, 41))
    assert [epochs.read(root, number).epoch for number in range(1, 41)] == list(range(1, 41))


def test_racing_threads_never_share_an_epoch(root: Root) -> None:
    numbers = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait(60)
        numbers.append(epochs.claim(root, "run", fresh=False, parent=None).epoch)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(numbers) == list(range(1, 9))


@pytest.mark.parametrize("where", ["file/below", "file", "/proc/nowhere/root"])
def test_a_root_that_cannot_be_written_is_the_users_mistake(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(UsageError, match="can't be written") as caught:
        epochs.claim(Root.open(tmp_path / where), "run", fresh=False, parent=None)
    assert where in str(caught.value)
    assert "checkpoint.root" in str(caught.value)


# --- manifests ----------------------------------------------------------------------------------------------

SAMPLE = Manifest(
    format=1,
    ftrun="0.1",
    torch="2",
    python="3",
    run_id="run",
    epoch=1,
    attempt="e00000001-s0000000002-00000000",
    parent=None,
    step=2,
    total=None,
    world_size=1,
    nodes=1,
    reason="interval",
    data={"samples": 3},
    files={"r00000.json": FileRecord(3, 7, (7,))},
    written_at="now",
)


def sealed(document: dict[str, Any] | bytes) -> bytes:
    body = document if isinstance(document, bytes) else canonical(document)
    return body[:-1] + f',\n"manifest_crc":"{crc32c(body):08x}"}}\n'.encode()


def changed(**fields: Any) -> bytes:
    document = dict(SAMPLE.__dict__) | {"files": {"r00000.json": FileRecord(3, 7, (7,)).to_json()}}
    document.update(fields)
    return sealed({name: value for name, value in document.items() if value is not ...})


def test_a_manifest_comes_back() -> None:
    data = SAMPLE.to_bytes()
    assert Manifest.from_bytes(data) == SAMPLE
    assert data == changed()
    assert data.splitlines()[-1].startswith(b'"manifest_crc":"')


def test_any_changed_or_missing_byte_of_a_manifest_shows() -> None:
    data = SAMPLE.to_bytes()
    for position in range(len(data)):
        for bit in (0x01, 0x20, 0x80):
            damaged = data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]
            with pytest.raises(BadManifestError):
                Manifest.from_bytes(damaged)
        with pytest.raises(BadManifestError):
            Manifest.from_bytes(data[:position])


RECORD = {"size": 3, "crc32c": "00000007", "chunks": ["00000007"]}
BAD_MANIFESTS = {
    "empty": (b"", "is empty"),
    "zeros": (b"\0" * 500, "zero bytes"),
    "torn": (SAMPLE.to_bytes()[:100], "torn"),
    "all but one byte": (SAMPLE.to_bytes()[:-1], "torn"),
    "appended": (SAMPLE.to_bytes() + b"\n", "torn"),
    "twice": (SAMPLE.to_bytes() * 2, "checksum"),
    "duplicate keys": (sealed(SAMPLE.to_bytes().split(b',\n"')[0] + b',"step":9}'), "key 'step' twice"),
    "not json": (sealed(b'{"a":nope}'), "no valid JSON"),
    "deep": (sealed(b'{"a":' + b"[" * 100_000 + b"}"), "no valid JSON"),
    "nan": (sealed(b'{"a":NaN}'), "NaN"),
    "no fields": (sealed(b'{"format":1}'), "'ftrun'"),
    "format as text": (changed(format="1"), "'format'"),
    "format as true": (changed(format=True), "'format'"),
    "step as text": (changed(step="2"), "'step'"),
    "step as float": (changed(step=2.0), "'step'"),
    "negative step": (changed(step=-1), "'step'"),
    "no step": (changed(step=...), "'step'"),
    "no ranks": (changed(world_size=0), "'world_size'"),
    "files as list": (changed(files=[]), "'files'"),
    "data as list": (changed(data=[]), "'data'"),
    "run_id null": (changed(run_id=None), "'run_id'"),
    "upward": (changed(files={"../x": RECORD}), "no file of a checkpoint"),
    "inner upward": (changed(files={"done/../../x": RECORD}), "no file of a checkpoint"),
    "absolute": (changed(files={"/etc/passwd": RECORD}), "no file of a checkpoint"),
    "hidden": (changed(files={".x": RECORD}), "no file of a checkpoint"),
    "itself": (changed(files={MANIFEST: RECORD}), "no file of a checkpoint"),
    "newline": (changed(files={"x\n": RECORD}), "no file of a checkpoint"),
    "nameless": (changed(files={"": RECORD}), "no file of a checkpoint"),
    "negative size": (changed(files={"x": RECORD | {"size": -1}}), "size is -1"),
    "size as true": (changed(files={"x": RECORD | {"size": True}}), "size is True"),
    "chunks missing": (changed(files={"x": RECORD | {"chunks": []}}), "chunk checksums"),
    "checksum as number": (changed(files={"x": RECORD | {"crc32c": 7}}), "no checksum"),
    "record as text": (changed(files={"x": "y"}), "a file record needs"),
    "another's": (SAMPLE.to_bytes(), "is that of e00000001-s0000000002-00000000"),
}


@pytest.mark.parametrize("content", BAD_MANIFESTS.values(), ids=BAD_MANIFESTS)
def test_a_bad_manifest_is_skipped_with_its_reason(root: Root, content: tuple[bytes, str]) -> None:
    data, reason = content
    (root.path / "ckpt" / str(AttemptName(1, 9, "aaaaaaaa"))).mkdir(parents=True)
    path_of(root, AttemptName(1, 9, "aaaaaaaa"), MANIFEST).write_bytes(data)
    with pytest.raises(NoValidCheckpoint) as caught:
        reader.latest(root, "run")
    assert reason in str(caught.value)
    save(root, 5)
    choice = reader.latest(root, "run")
    assert choice.commit.manifest.step == 5
    assert [name for name, _ in choice.skipped] == ["e00000001-s0000000009-aaaaaaaa"]
    assert reason in choice.skipped[0][1]
    assert [info.status for info in reader.attempts(root)] == ["invalid", "committed"]


def test_a_newer_format_stops_everything_instead_of_being_skipped(root: Root) -> None:
    save(root, 1)
    name = save(root, 2)
    path_of(root, name, MANIFEST).write_bytes(changed(format=3, ftrun="9.9", world_size="many"))
    with pytest.raises(NewerFormatError, match=r"newer ftrun \(9\.9, format 3"):
        reader.latest(root, "run")
    assert [info.status for info in reader.attempts(root)] == ["invalid", "committed"]
    assert "newer ftrun" in reader.attempts(root)[0].reason
    save(root, 3)
    assert latest_step(root) == 3


# --- the latest ---------------------------------------------------------------------------------------------


def test_nothing_there_is_no_checkpoint(root: Root) -> None:
    assert reader.latest(root, "run") == reader.Choice(None, ())
    assert reader.attempts(root) == []
    assert epochs.current(root) is None
    (root.path / "ckpt" / "e00000001-s0000000001-00000000" / "done").mkdir(parents=True)
    (root.path / "ckpt" / "other").mkdir()
    (root.path / "LATEST").write_text("nonsense")
    assert reader.latest(root, "run") == reader.Choice(None, ())
    assert [info.status for info in reader.attempts(root)] == ["uncommitted"]


def test_a_root_that_cannot_be_listed_is_no_fresh_start(root: Root) -> None:
    root.path.mkdir()
    (root.path / "ckpt").write_text("a file")
    with pytest.raises(CheckpointError, match=r"can't list .*checkpoint\.root"):
        reader.latest(root, "run")


def test_order_is_epoch_then_step_whatever_the_clocks_say(root: Root) -> None:
    for age, (epoch, step) in enumerate([(8, 900), (6, 1500), (8, 100), (10, 5)]):
        name = save(root, step, epoch=epoch)
        for path in (root.path / "ckpt" / str(name), path_of(root, name, MANIFEST)):
            os.utime(path, (2_000_000_000 - age * 10_000, 2_000_000_000 - age * 10_000))
    (root.path / "LATEST").write_text(str(AttemptName(6, 1500, "00000000")))
    order = [(info.name.epoch, info.name.step) for info in reader.attempts(root)]
    assert order == [(10, 5), (8, 900), (8, 100), (6, 1500)]
    assert latest_step(root) == 5
    assert latest_step(root, exclude={str(AttemptName(10, 5, "00000000"))}) == 900


def test_commits_before_the_lineage_are_out_of_sight(root: Root) -> None:
    save(root, 5, epoch=2)
    (root.path / "LATEST").write_text(str(AttemptName(2, 5, "00000000")))
    assert latest_step(root, since=2) == 5
    assert latest_step(root, since=3) is None


def test_another_runs_commits_are_skipped_and_said(root: Root) -> None:
    save(root, 5)
    save(root, 6, run_id="other")
    choice = reader.latest(root, "run")
    assert choice.commit.manifest.step == 5
    assert choice.skipped == ((str(AttemptName(1, 6, "00000000")), "belongs to the run 'other'"),)


def missing(path: Path) -> None:
    path.unlink()


def short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def long(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("file", [rank_shard(0), rank_json(0)])
@pytest.mark.parametrize("damage", [missing, short, long, directory])
def test_a_file_that_is_missing_or_has_another_size(root: Root, damage: Callable[[Path], None], file: str) -> None:
    name = save(root, 5)
    damage(path_of(root, name, file))
    with pytest.raises(NoValidCheckpoint) as caught:
        reader.latest(root, "run")
    message = str(caught.value)
    assert file in message
    assert str(name) in message
    assert "ftrun ckpt ls" in message
    assert "--fresh" in message
    save(root, 4)
    assert latest_step(root) == 4


def test_a_flipped_byte_in_done_records_or_latest_changes_nothing(root: Root) -> None:
    name = save(root, 5)
    flip(path_of(root, name, "done/n0000.json"), 20)
    flip(root.path / "LATEST", 3)
    assert latest_step(root) == 5


def test_a_checkpoint_marked_bad_is_not_chosen_again(root: Root) -> None:
    save(root, 4)
    name = save(root, 5)
    reader.mark_bad(root, str(name), "chunk 3 fails its checksum")
    reader.mark_bad(root, name, "again")
    choice = reader.latest(root, "run")
    assert choice.commit.manifest.step == 4
    assert choice.skipped == ((str(name), "is marked as bad: chunk 3 fails its checksum"),)
    assert [info.status for info in reader.attempts(root)] == ["bad", "committed"]
    (root.path / bad_key(name)).write_bytes(b"")
    assert latest_step(root) == 4


@pytest.mark.parametrize("hidden", ["bad", "excluded", "manifest lost", "directory lost"])
def test_commits_that_cannot_be_used_are_never_a_fresh_start(root: Root, hidden: str) -> None:
    name = save(root, 5)
    exclude = {str(name)} if hidden == "excluded" else set()
    if hidden == "bad":
        reader.mark_bad(root, name, "damaged")
    if hidden in ("manifest lost", "directory lost"):
        root.delete(attempt_key(name, MANIFEST))
    if hidden == "directory lost":
        (root.path / "ckpt" / str(name)).rename(root.path / "elsewhere")
    with pytest.raises(NoValidCheckpoint, match=str(name)):
        reader.latest(root, "run", exclude=exclude)
