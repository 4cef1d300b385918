"""A remote store that is slow, hung, flaky, forgetful, stale or away, and what is made of it."""

from __future__ import annotations

import errno
import random
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from conftest import eventually
from storage_kit import QUICK, DoubleFileSystem, Fault, Store, write_attempt

from ftrun.checkpoint import common, epochs, leftovers, reader, retention, verify
from ftrun.checkpoint.layout import MANIFEST, AttemptName, Root, attempt_key
from ftrun.checkpoint.sealed import seal
from ftrun.checkpoint.storage import retry
from ftrun.checkpoint.storage.base import UnreachableError
from ftrun.checkpoint.storage.retry import HungError, Life, Patience, is_transient, persist
from ftrun.errors import CheckpointError, NoValidCheckpoint, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = AttemptName(1, 2, "0123abcd")


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    fsspec.register_implementation("double", DoubleFileSystem, clobber=True)
    made = DoubleFileSystem.stores["name"] = Store()
    yield made
    made.free.set()
    del DoubleFileSystem.stores["name"]


def open_root(patience: Patience = QUICK) -> Root:
    return Root.open("double://name/root", patience=patience)


@pytest.fixture
def root(store: Store) -> Root:
    return open_root()


def put(root: Root, key: str, *parts: bytes) -> None:
    root.put(key, lambda: map(memoryview, parts), sum(map(len, parts)))


# --- patience -----------------------------------------------------------------------------------------------


class NoCredentialsError(Exception):
    """As drivers raise it."""


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (OSError(errno.EIO, "x"), True),
        (OSError(errno.EBUSY, "slow down"), True),
        (OSError("anything"), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (HungError(), True),
        (RuntimeError("a driver's own"), True),
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EROFS, "x"), False),
        (OSError(errno.EINVAL, "x"), False),
        (FileNotFoundError(), False),
        (FileExistsError(), False),
        (PermissionError(), False),
        (IsADirectoryError(), False),
        (ValueError(), False),
        (TypeError(), False),
        (UsageError("x"), False),
        (EOFError(), False),
    ],
)
def test_what_is_worth_another_try(error: Exception, transient: bool) -> None:
    assert is_transient(error) is transient


def test_pauses_grow_to_a_limit_and_are_never_the_same() -> None:
    patience = Patience(first=1.0, last=10.0)
    assert [patience.pause(tries, 0.0) for tries in (1, 2, 3, 4, 5, 5000)] == [0.5, 1, 2, 4, 5, 5]
    assert [patience.pause(tries, 0.5) for tries in (1, 2, 5)] == [0.75, 1.5, 7.5]
    assert all(0 < patience.pause(tries, 0.999) <= 10 for tries in range(1, 100))


def test_a_call_is_tried_until_it_succeeds() -> None:
    left = [ConnectionError(), TimeoutError(), None]

    def call(life: Life) -> int:
        life.beat()
        error = left.pop(0)
        if error is not None:
            raise error
        return 7

    before = random.getstate()
    assert persist(call, QUICK, "x") == 7
    assert left == []
    assert random.getstate() == before  # it runs beside training, whose draws are the same however often it tries


def test_at_the_deadline_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    now = [0.0]  # a clock of its own: on a busy machine the first try alone may take that long

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))

    def call(life: Life) -> None:
        tries.append(1)
        raise ConnectionError("no route to host")

    with pytest.raises(CheckpointError, match=r"reading s3://b failed for 0 s, \d+ tries, .* no route to host"):
        persist(call, replace(QUICK, deadline=0.05), "reading s3://b")
    assert len(tries) > 1


@pytest.mark.parametrize("silent", [0.0, 60.0])
def test_trouble_that_lasts_is_told_once(
    silent: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retry, "_SILENT", silent)
    left = [ConnectionError("no route to host")] * 3

    def call(life: Life) -> str:
        if left:
            raise left.pop()
        return "done"

    assert persist(call, QUICK, "reading s3://b") == "done"
    told = [each.getMessage() for each in caplog.records]
    assert told == ["ftrun: reading s3://b fails (no route to host); tried again for at most 180 s"] * (silent == 0)


def test_a_hung_call_is_left_behind_and_may_not_go_on() -> None:
    free, said = threading.Event(), []

    def call(life: Life) -> str:
        said.append(life)
        if len(said) == 1:
            free.wait(30)
            life.beat()
        return "second"

    assert persist(call, replace(QUICK, hang=0.05), "x") == "second"
    with pytest.raises(HungError):
        said[0].beat()
    said[-1].beat()  # on a busy machine the second one may be left behind as well
    free.set()


def test_signs_of_life_keep_a_long_call_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]  # a clock of its own: on a busy machine any thread may stand still for that long
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))

    def call(life: Life) -> str:
        for _ in range(10):
            now[0] += 0.1
            life.beat()
            time.sleep(0.05)
        return "done"

    assert persist(call, Patience(deadline=0.0, hang=0.3), "x") == "done"


# --- single operations --------------------------------------------------------------------------------------

FLAKY = [ConnectionResetError("reset"), OSError(errno.EIO, "internal error"), TimeoutError("5xx")]


@pytest.mark.parametrize("verb", ["info", "pipe", "cat", "open", "part", "close", "find", "ls", "rm"])
@pytest.mark.parametrize("how", FLAKY, ids=lambda error: type(error).__name__)
def test_any_request_may_fail_a_few_times(store: Store, root: Root, verb: str, how: Exception) -> None:
    store.faults = [Fault(verb, how=how, times=3)]
    root.create(attempt_key(NAME, "a"), b"a" * 10)
    put(root, attempt_key(NAME, "b"), b"b" * 5, b"c" * 5)
    root.write("LATEST", b"x")
    assert root.files(NAME) == {"a": 10, "b": 10}
    assert root.attempts() == [NAME]
    assert root.read(attempt_key(NAME, "b")) == b"b" * 5 + b"c" * 5
    root.delete("LATEST")
    assert root.size("LATEST") is None
    assert store.faults[0].times == 0, "each fault struck"


@pytest.mark.parametrize(("verb", "write"), [("pipe", "create"), ("pipe", "write"), ("close", "put")])
def test_an_answer_that_is_lost_is_no_failure(store: Store, root: Root, verb: str, write: str) -> None:
    store.faults = [Fault(verb, how="lost")]
    if write == "put":
        put(root, "x", b"abc")
    else:
        getattr(root, write)("x", b"abc")
    assert root.read("x") == b"abc"
    assert store.faults[0].times == 0


@pytest.mark.parametrize(("verb", "write"), [("pipe", "write"), ("close", "put")])
def test_a_store_that_says_yes_and_keeps_half_is_asked_again(store: Store, root: Root, verb: str, write: str) -> None:
    store.faults = [Fault(verb, how="short", times=2)]
    if write == "put":
        put(root, "x", b"abcdef")
    else:
        root.write("x", b"abcdef")
    assert root.read("x") == b"abcdef"


@pytest.mark.parametrize("write", ["create", "write", "put"])
def test_a_store_that_always_keeps_half_is_told_of(store: Store, write: str) -> None:
    root = open_root(replace(QUICK, deadline=0.1))
    store.faults = [Fault(verb, how="short", times=10**6) for verb in ("pipe", "close")]
    with pytest.raises(CheckpointError, match="kept 3 of 6 bytes") as caught:
        put(root, "x", b"abcdef") if write == "put" else getattr(root, write)("x", b"abcdef")
    assert "double://name/root/x" in str(caught.value)


@pytest.mark.parametrize("verb", ["info", "part", "close", "pipe", "cat", "ls"])
def test_a_hung_request_is_left_behind(store: Store, verb: str) -> None:
    root = open_root(replace(QUICK, hang=0.2))
    store.faults = [Fault(verb)]
    root.create("ckpt/x", b"a")
    put(root, "ckpt/y", b"abc", b"def")
    assert root.attempts() == []
    assert (root.read("ckpt/x"), root.read("ckpt/y")) == (b"a", b"abcdef")
    assert store.faults[0].times == 0


def test_an_upload_that_was_left_behind_never_appears(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may hold the next snapshot by then."""

    def now() -> float:  # a clock of its own, which stands still until the part is on its way
        return 2.0 if any(verb == "part" for verb, _ in store.asked) else 0.0

    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    root = open_root(Patience(deadline=1.0, hang=1.0, first=0.001))
    slot = bytearray(b"old old ")
    passes = 0

    def source() -> Iterator[memoryview]:
        nonlocal passes
        passes += 1
        for start in (0, 4):
            yield memoryview(slot)[start : start + 4]

    store.faults = [Fault("part")]
    with pytest.raises(CheckpointError, match="no answer for 1 s"):
        root.put("x", source, 8)
    slot[:] = b"new new "
    left = [each for each in threading.enumerate() if each.name == "ftrun-storage"]
    assert left
    store.free.set()
    eventually(lambda: not any(each.is_alive() for each in left), what="the end of the thread that was left behind")
    assert passes == 1
    assert store.files == {}


def test_a_remote_that_is_down_for_a_while_costs_nothing_but_time(store: Store, root: Root) -> None:
    down = [Fault(verb, how=ConnectionError("down"), times=40) for verb in ("info", "open")]
    store.faults = down
    root = open_root(Patience(deadline=60.0, hang=10.0, first=0.001, last=0.002))
    put(root, "x", b"abc")
    assert root.read("x") == b"abc"
    assert [fault.times for fault in down] == [0, 0]


def test_conditional_writes_are_used_where_the_store_knows_them(store: Store, root: Root) -> None:
    root.create("a", b"1")
    store.knows_create = False
    root.create("b", b"1")
    for key in "ab":
        with pytest.raises(FileExistsError):
            root.create(key, b"1")
    assert store.files == {"name/root/a": b"1", "name/root/b": b"1"}


def test_the_late_one_of_two_writers_sees_that_it_lost(
    store: Store, root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both looked, and saw nothing; the store replaces without a word."""

    def replaced(self: DoubleFileSystem, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        return b"the other one's"

    monkeypatch.setattr(DoubleFileSystem, "cat_file", replaced)
    with pytest.raises(FileExistsError, match="somebody else"):
        root.create("x", b"mine")


def test_nodes_that_leave_their_mark_at_the_same_time_find_one(
    store: Store, root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(_seconds: float) -> None:
        store.files[f"name/root/{common.MARK}"] = seal({"mark": "the other one's"})

    store.knows_create = False
    monkeypatch.setattr(common, "time", SimpleNamespace(sleep=late))
    assert common.mark(root) == "the other one's"


def test_listings_are_never_those_of_before(store: Store, root: Root) -> None:
    assert root.attempts() == []
    assert root.files(NAME) == {}
    store.files[f"name/root/ckpt/{NAME}/a"] = b"1"  # another machine
    assert root.attempts() == [NAME]
    assert root.files(NAME) == {"a": 1}
    store.files[f"name/root/ckpt/{NAME}/b"] = b"22"
    assert root.files(NAME) == {"a": 1, "b": 2}
    assert root.size(attempt_key(NAME, "b")) == 2


def test_credentials_and_permissions_are_the_users_to_mend(store: Store, root: Root) -> None:
    for error, said in (
        (NoCredentialsError("unable to locate credentials"), "no valid credentials: unable to locate"),
        (PermissionError("Forbidden"), "access was denied: Forbidden"),
        (NotImplementedError("read only"), "can't do that"),
    ):
        store.faults = [Fault("info", how=error, times=1000)]
        with pytest.raises(UsageError, match=said) as caught:
            epochs.claim(root, "run", fresh=False, parent=None)
        assert "double://name/root" in str(caught.value)
        assert "checkpoint.root" in str(caught.value)
        store.faults = [Fault("ls", how=error, times=1000)]
        with pytest.raises(CheckpointError, match=said):
            reader.latest(root, "run")


def test_a_password_in_a_url_is_not_told(store: Store) -> None:
    root = Root.open("memory://someone:secret@host/x", patience=QUICK)
    assert root.url == "memory://host/x"
    assert "secret" not in repr(root)


# --- readers and cleaners over a URL ------------------------------------------------------------------------


def test_the_latest_is_found_with_few_requests(store: Store, root: Root) -> None:
    epochs.claim(root, "run", fresh=False, parent=None)
    names = [write_attempt(root, step, world_size=8) for step in (1, 2)]
    write_attempt(root, 3, world_size=8, commit=False)
    store.asked.clear()
    choice = reader.latest(root, "run")
    assert choice.commit is not None
    assert choice.commit.name == names[1]
    assert len(store.asked) <= 8, store.asked


def test_a_store_that_lost_a_file_is_found_out(store: Store, root: Root) -> None:
    old, new = write_attempt(root, 1), write_attempt(root, 2)
    store.files[f"name/root/ckpt/{new}/r00001.0.safetensors"] = b"short"
    choice = reader.latest(root, "run")
    assert choice.commit is not None
    assert choice.commit.name == old
    assert choice.skipped == ((str(new), "r00001.0.safetensors has 5 bytes instead of 1000"),)
    del store.files[f"name/root/ckpt/{new}/r00001.0.safetensors"]
    assert reader.inspect(root, new).reason == "r00001.0.safetensors is missing"


@pytest.mark.parametrize("verb", ["ls", "find", "cat"])
def test_a_store_that_is_away_is_no_reason_to_start_over(store: Store, verb: str) -> None:
    """Nor to use an older checkpoint, nor to take the root for nobody's."""
    root = open_root(replace(QUICK, deadline=0.05))
    epochs.claim(root, "other", fresh=False, parent=None)
    write_attempt(root, 1)
    write_attempt(root, 2)
    store.faults = [Fault(verb, key=kind, how=ConnectionError("down"), times=10**6) for kind in ("ckpt", "epochs")]
    with pytest.raises(CheckpointError, match="down"):
        reader.latest(root, "run")
    with pytest.raises((CheckpointError, UsageError), match=r"down|holds the run 'other'"):
        reader.resume_point(root, "run")
    store.faults = [Fault(verb, how=ConnectionError("down"), times=10**6) for verb in ("ls", "cat")]
    with pytest.raises(UnreachableError, match="down"):
        epochs.claim(root, "run", fresh=False, parent=None)
    store.faults = []
    with pytest.raises(UsageError, match="holds the run 'other'"):
        reader.resume_point(root, "run")


def test_an_attempt_that_may_not_be_looked_into_is_no_reason_to_start_over(store: Store, root: Root) -> None:
    name = write_attempt(root, 1)
    store.faults = [Fault("find", how=PermissionError("Forbidden"), times=10**6)]
    with pytest.raises(CheckpointError, match=f"can't list {name} in double://name/root: access was denied"):
        reader.latest(root, "run")


def test_bad_manifests_and_bad_marks_count_over_a_url(store: Store, root: Root) -> None:
    name = write_attempt(root, 1)
    reader.mark_bad(root, name, "chunk 0 fails its checksum")
    with pytest.raises(NoValidCheckpoint, match=r"double://name/root holds checkpoints .*\n.*chunk 0"):
        reader.latest(root, "run")
    name = write_attempt(root, 2)
    key = f"name/root/ckpt/{name}/{MANIFEST}"
    store.files[key] = store.files[key][:100]
    assert reader.inspect(root, name).reason.startswith("MANIFEST.json is torn")


def test_verifying_over_a_url(store: Store, root: Root) -> None:
    name = write_attempt(root, 1, payload=5000)
    manifest = reader.inspect(root, name).manifest
    assert manifest is not None
    assert verify.verify(root, name, manifest) == []
    key = f"name/root/ckpt/{name}/r00001.0.safetensors"
    store.files[key] = store.files[key][:-1] + b"?"
    (damage,) = verify.verify(root, name, manifest)
    assert (damage.file, damage.chunk, damage.first, damage.last) == ("r00001.0.safetensors", 0, 0, 4999)
    store.files[key] = store.files[key][:-1]
    (damage,) = verify.verify(root, name, manifest)
    assert damage.problem == "has 4999 bytes instead of 5000"
    store.faults = [Fault("cat", "r00000.0", how=PermissionError("no"), times=10**6)]
    assert [(each.file, each.certain) for each in verify.verify(root, name, manifest)] == [
        ("r00000.0.safetensors", False),
        ("r00001.0.safetensors", True),
    ]


def test_retention_and_leftovers_over_a_url(store: Store, root: Root) -> None:
    first = epochs.claim(root, "run", fresh=False, parent=None)
    names = [write_attempt(root, step, epoch=first.epoch) for step in (1, 2, 3)]
    dead = write_attempt(root, 4, epoch=first.epoch, commit=False)
    second = epochs.claim(root, "run", fresh=False, parent=str(names[2]))
    gone = retention.apply(root, retention.KeepPolicy(2), run_id="run", since=1, parent=str(names[2]))
    assert gone == [names[0]]
    now = [0.0]
    sweeper = leftovers.Leftovers(root, run_id="run", epoch=second.epoch, wait=10, clock=lambda: now[0])
    assert sweeper.sweep() == []
    now[0] = 10.0
    assert sweeper.sweep() == [dead]
    assert root.attempts() == [names[2], names[1]]
