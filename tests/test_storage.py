"""Storage: what every kind of it must do, and a directory in particular."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from storage_kit import QUICK, DoubleFileSystem, Store

from ftrun.checkpoint import epochs
from ftrun.checkpoint.layout import AttemptName, Root, attempt_key, pin_key
from ftrun.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = AttemptName(1, 2, "0123abcd")


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """Options for the real driver of S3, and a server that it takes for S3."""
    pytest.importorskip("s3fs", reason="the driver of S3 isn't installed")
    moto = pytest.importorskip("moto.server", reason="the server isn't installed: pip install 'moto[server]'")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {"key": "a", "secret": "b", "endpoint_url": f"http://{host}:{port}"}
    server.stop()


@pytest.fixture(params=["path", "file url", "memory", "double", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Root]:
    unique = uuid.uuid4().hex
    if request.param == "s3":
        options = request.getfixturevalue("s3")
        fsspec.filesystem("s3", **options).mkdir(unique)
        yield Root.open(f"s3://{unique}/a b%20c", options)
    elif request.param == "path":
        yield Root.open(tmp_path / "a root with % and ü")
    elif request.param == "file url":
        yield Root.open(f"file://{tmp_path}/a root%20")
    elif request.param == "memory":
        yield Root.open(f"memory://{unique}/a b%20c", patience=QUICK)
        for key in fsspec.filesystem("memory").find(f"/{unique}"):
            fsspec.filesystem("memory").rm_file(key)
    else:
        fsspec.register_implementation("double", DoubleFileSystem, clobber=True)
        DoubleFileSystem.stores[unique] = Store(files={f"{unique}/elsewhere": b"x"})
        yield Root.open(f"double://{unique}/a b%20c/", patience=QUICK)
        del DoubleFileSystem.stores[unique]


def put(root: Root, key: str, *parts: bytes) -> None:
    root.put(key, lambda: map(memoryview, parts), sum(map(len, parts)))


def test_an_empty_place_is_empty(root: Root) -> None:
    assert (root.epochs(), root.attempts(), root.pins(), root.bad()) == ([], [], [], [])
    assert root.files(NAME) == {}
    assert root.size("x") is None
    with pytest.raises(FileNotFoundError):
        root.read("x")
    root.delete("x")
    root.delete_files(NAME, ["a", "b"])


def test_what_is_written_is_read(root: Root) -> None:
    root.make_attempt(NAME)
    root.create(attempt_key(NAME, "done/n0000.json"), b"done")
    put(root, attempt_key(NAME, "r00000.0.safetensors"), b"abc", b"", b"defgh")
    put(root, attempt_key(NAME, "empty"))
    root.write("LATEST", b"one")
    root.write("LATEST", b"two!")
    root.sync_attempt(NAME)
    root.sync_attempts()
    assert root.read("LATEST") == b"two!"
    assert root.files(NAME) == {"done/n0000.json": 4, "r00000.0.safetensors": 8, "empty": 0}
    assert root.sizes(NAME, ["empty", "no"]) == {"empty": 0, "no": None}
    assert root.attempts() == [NAME]
    assert root.size(attempt_key(NAME, "r00000.0.safetensors")) == 8
    assert root.size(f"ckpt/{NAME}") is None, "a directory is no file"
    assert root.read(attempt_key(NAME, "r00000.0.safetensors")) == b"abcdefgh"


def test_ranges_are_read_exactly(root: Root) -> None:
    put(root, "x", b"abcdefgh")
    buffer = bytearray(3)
    root.read_into("x", 5, memoryview(buffer))
    assert buffer == b"fgh"
    root.read_into("x", 8, memoryview(b""))
    for offset in (6, 8, 100):
        with pytest.raises(EOFError):
            root.read_into("x", offset, memoryview(buffer))
    with root.opened("x") as file:
        file.read_into(0, memoryview(buffer))
        assert file.granule > 0
    assert buffer == b"abc"
    with pytest.raises(FileNotFoundError):
        root.read_into("y", 0, memoryview(buffer))


def test_nothing_is_written_twice(root: Root) -> None:
    root.create("a", b"1")
    put(root, "b", b"1")
    for write in (lambda: root.create("a", b"1"), lambda: put(root, "b", b"1"), lambda: put(root, "a", b"2")):
        with pytest.raises(FileExistsError):
            write()
    assert (root.read("a"), root.read("b")) == (b"1", b"1")


def test_a_source_of_the_wrong_length_is_a_mistake_and_leaves_nothing(root: Root) -> None:
    for size in (2, 4):
        with pytest.raises(ValueError, match=f"{size} bytes, and its source gave 3"):
            root.put("x/y", lambda: iter([memoryview(b"abc")]), size)
    assert root.size("x/y") is None


@pytest.mark.parametrize("kind", [ValueError, OSError, RuntimeError, CheckpointError, ConnectionError])
def test_a_source_that_fails_leaves_nothing_and_is_not_asked_again(root: Root, kind: type[Exception]) -> None:
    asked: list[int] = []

    def source() -> Iterator[memoryview]:
        asked.append(1)
        yield memoryview(b"abc")
        raise kind("the slot is gone")

    with pytest.raises(kind, match="slot is gone"):
        root.put("x/y", source, 6)
    assert root.size("x/y") is None
    assert asked == [1]


def test_an_attempt_is_deleted_file_by_file(root: Root) -> None:
    for file in ("a", "b", "done/c", "mine"):
        put(root, attempt_key(NAME, file), b"x")
    root.delete_files(NAME, ["a", "b", "never"])
    assert not root.remove_attempt(NAME)
    assert set(root.files(NAME)) == {"done/c", "mine"}
    root.delete_files(NAME, ["done/c", "mine"])
    assert root.remove_attempt(NAME)
    assert root.attempts() == []
    root.abort_uploads(NAME)


def test_pins_and_marks_are_notes_beside_the_checkpoints(root: Root) -> None:
    other = AttemptName(3, 4, "00000000")
    root.pin(NAME, "best")
    root.pin(NAME)
    root.pin(other)
    root.create("pins/notes.txt", b"")
    assert root.pins() == [other, NAME]
    assert root.read(pin_key(NAME)).startswith(b"{")
    root.unpin(other)
    root.unpin(other)
    assert root.pins() == [NAME]


def test_epochs_count_up_anywhere(root: Root) -> None:
    records = [epochs.claim(root, "run", fresh=False, parent=None) for _ in range(2)]
    assert [record.epoch for record in records] == [1, 2]
    assert epochs.current(root) == records[1]
    with pytest.raises(UsageError, match="holds the run 'run'"):
        epochs.claim(root, "other", fresh=False, parent=None)


def test_racing_threads_create_one_file(root: Root) -> None:
    if root.url.startswith("memory"):
        pytest.skip("it looks first and writes then")
    winners: list[int] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait(60)
        try:
            root.create("epochs/00000001.json", f"{number}".encode() * 100)
        except FileExistsError:
            return
        winners.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(winners) == 1
    assert root.read("epochs/00000001.json") == f"{winners[0]}".encode() * 100


# --- names of roots -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "path"),
    [
        ("/a/b", "/a/b"),
        ("file:///a/b c%20", "/a/b c%20"),
        ("local:///a", "/a"),
        ("/a/b:c", "/a/b:c"),
        ("s3:/a", f"{Path.cwd()}/s3:/a"),
    ],
)
def test_paths(where: str, path: str) -> None:
    root = Root.open(where)
    assert (str(root.path), root.url, root.remote) == (path, path, False)
    assert str(root.open_local("x")) == f"{path}/x"


def test_urls() -> None:
    root = Root.open("memory://a/b/")
    assert (root.url, root.remote, root.open_local("x")) == ("memory://a/b", True, None)
    with pytest.raises(UsageError, match="is no directory of this machine"):
        _ = root.path


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("", "is empty"),
        ("a\0b", "zero byte"),
        ("nonsense://x", "Protocol not known: nonsense"),
        ("simplecache::s3://x", "only one kind of storage"),
        ("s3::x", "only one kind of storage"),
        ("file://relative", "file:///some/where"),
        ("s3://", "names no bucket"),
        ("gs:///", "names no bucket"),
    ],
)
def test_what_names_no_root(where: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        Root.open(where)
    assert "checkpoint" in str(caught.value)


@pytest.mark.parametrize(("url", "extra"), [("s3://b/x", "s3"), ("gs://b/x", "gcs"), ("az://b/x", "azure")])
def test_a_missing_driver_is_named(url: str, extra: str) -> None:
    # In a process where the drivers can't be found, whether or not this environment has them.
    code = (
        "import sys\n"
        "for name in ('s3fs', 'gcsfs', 'adlfs'): sys.modules[name] = None\n"
        "from ftrun.checkpoint.layout import Root\n"
        "from ftrun.errors import UsageError\n"
        f"try: Root.open({url!r})\n"
        "except UsageError as error: print(error)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"pip install 'ftrun[{extra}]'" in done.stdout, done.stderr


def test_fsspec_is_imported_for_urls_only(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from ftrun.checkpoint import epochs, leftovers, reader, retention, verify\n"
        "from ftrun.checkpoint.layout import Root\n"
        f"root = Root.open({str(tmp_path)!r}); epochs.claim(root, 'run', fresh=False, parent=None)\n"
        "assert not {'fsspec', 'torch', 'numpy', 'asyncio'} & set(sys.modules), sys.modules\n"
        "Root.open('memory://x')\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_driver_that_does_not_take_the_options() -> None:
    class Strict(DoubleFileSystem):
        protocol = "strict"

        def __init__(self, user: str) -> None:
            super().__init__()
            if user == "nobody":
                raise RuntimeError("no such user")

    fsspec.register_implementation("strict", Strict, clobber=True)
    with pytest.raises(UsageError, match="doesn't take these options"):
        Root.open("strict://x", {"users": "me"})
    with pytest.raises(CheckpointError, match="can't connect: no such user"):
        Root.open("strict://x", {"user": "nobody"})
    assert Root.open("strict://x", {"user": "me"}).url == "strict://x"


# --- a directory --------------------------------------------------------------------------------------------


class Disk:
    """Lets so many bytes through to files, then fails; fails in fsync on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fsync: int | None = None, link: int | None = None) -> None:
        self._real = {"fsync": os.fsync, "link": os.link}
        for name, number in (("fsync", fsync), ("link", link)):
            if number is not None:
                monkeypatch.setattr(os, name, self._failing(number))

    def _failing(self, number: int) -> Any:
        def fail(*arguments: Any) -> None:
            raise OSError(number, os.strerror(number))

        return fail


def left(root: Root) -> list[str]:
    return sorted(str(path.relative_to(root.path)) for path in root.path.rglob("*") if path.is_file())


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_sync_that_fails_leaves_nothing_and_the_next_try_is_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    root = Root.open(tmp_path / "root")
    put(root, "ckpt/a", b"old")
    for write in (
        lambda: put(root, "ckpt/b", b"new"),
        lambda: root.create("ckpt/b", b"new"),
        lambda: root.write("ckpt/a", b"new"),
    ):
        with monkeypatch.context() as patch:
            Disk(patch, fsync=number)
            with pytest.raises(OSError, match=os.strerror(number)):
                write()
        assert left(root) == ["ckpt/a"]
    assert root.read("ckpt/a") == b"old"
    put(root, "ckpt/b", b"new")
    assert root.read("ckpt/b") == b"new"


LIMITED = """
import resource, signal, sys
from ftrun.checkpoint.layout import Root
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
root = Root.open(sys.argv[1])
data = bytes(range(250)) * 4
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for limit in (0, 1, 499, 500, 501, 999):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    for number, write in enumerate((
        lambda: root.put("x", lambda: map(memoryview, (data[:500], data[500:])), 1000),
        lambda: root.create("x", data),
        lambda: root.write("x", data),
    )):
        try:
            write()
        except OSError as error:
            assert "File too large" in str(error), error
        else:
            sys.exit(f"{limit} {number}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert not list(root.path.iterdir()), list(root.path.iterdir())
root.put("x", lambda: map(memoryview, (data[:500], data[500:])), 1000)
assert root.read("x") == data
"""


def test_a_disk_that_is_full_at_any_byte_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.getrlimit(resource.RLIMIT_FSIZE)[1]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_filesystem_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    Disk(monkeypatch, link=number)
    root = Root.open(tmp_path / "root")
    put(root, "a", b"1")
    root.create("b", b"1")
    with pytest.raises(FileExistsError):
        put(root, "a", b"2")
    with pytest.raises(FileExistsError):
        root.create("b", b"2")
    assert left(root) == ["a", "b"]


def test_who_is_late_with_a_large_file_does_not_replace_it(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "root")

    def stopped() -> Iterator[memoryview]:
        yield memoryview(b"old")
        put(root, "x", b"new")  # somebody else takes over meanwhile

    with pytest.raises(FileExistsError):
        root.put("x", stopped, 3)
    assert root.read("x") == b"new"
    assert left(root) == ["x"]


def test_a_root_that_may_not_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        place = "/proc/self/nowhere"  # no permission stops this user: a place where nobody can write
    else:
        (tmp_path / "root").mkdir(mode=0o500)
        place = str(tmp_path / "root" / "inner")
    with pytest.raises(UsageError, match="can't be written") as caught:
        epochs.claim(Root.open(place), "run", fresh=False, parent=None)
    assert place in str(caught.value)
    assert Root.open(place).attempts() == []


def test_names_never_lead_out_of_the_root(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "root")
    (tmp_path / "root" / "ckpt").mkdir(parents=True)
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "root" / "ckpt" / str(NAME)).symlink_to(tmp_path)
    (tmp_path / "root" / "pins").mkdir()
    (tmp_path / "root" / "pins" / "..json").write_text("{}")
    assert root.pins() == []
    for text in ("../../secret", "..", f"../{NAME}", f"{NAME}/../x", f"{NAME}\0"):
        with pytest.raises(UsageError):
            AttemptName.of(text)


def test_links_within_an_attempt_are_not_followed(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "root")
    put(root, attempt_key(NAME, "a"), b"x")
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "file").write_text("mine")
    (root.path / "ckpt" / str(NAME) / "done").symlink_to(tmp_path / "outer")
    (root.path / "ckpt" / str(NAME) / "link").symlink_to(tmp_path / "outer" / "file")
    assert root.files(NAME) == {"a": 1}
    assert isinstance(CheckpointError("x"), OSError)
