"""Remotes that are slow, flaky, hung, out of descriptors; files that vanish, grow, shrink or arrive cut off."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import slow_mount
from cache_kit import QUICK, Place, content, read
from conftest import eventually

from ftrun.data.cache import patient
from ftrun.data.cache.files import CachedFiles
from ftrun.data.cache.records import Listing, Patience
from ftrun.data.cache.refusals import RemoteError, RemoteFileMissing
from ftrun.data.cache.remote import CHUNK, Remote
from ftrun.data.cache.threads import Threads
from ftrun.errors import UsageError


@pytest.mark.parametrize("fault", ["fail", "emfile"])
def test_a_flaky_remote_is_asked_again(place: Place, fault: str) -> None:
    url = place.put("a", b"at last")
    place.faults(**{fault: 2})
    files, before = place.files(), random.getstate()
    assert read(files, url) == b"at last"
    assert (files.counters().retries, len(place.requests())) == (2, 3)
    assert random.getstate() == before  # what a sample draws after it has read its file is the same


@pytest.mark.parametrize(("fault", "said"), [("fail", "the remote is unwell"), ("emfile", "ulimit -n")])
def test_a_remote_that_stays_ill_is_an_error_that_names_the_file(place: Place, fault: str, said: str) -> None:
    url = place.put("a", b"x")
    place.faults(**{fault: 99})
    with pytest.raises(RemoteError, match=said) as caught:
        read(place.files(), url)
    assert url in str(caught.value)
    assert "3 attempts" in str(caught.value)
    assert (place.debris(), place.sum()) == ([], 0)


def test_credentials_that_are_missing_are_asked_for() -> None:
    def refused() -> None:
        raise type("NoCredentialsError", (Exception,), {})("Unable to locate credentials")  # botocore's, by name

    with pytest.raises(RemoteError, match=r"Unable to locate .*Give the remote's credentials.*storage_options"):
        patient.persist("s3://bucket/a", refused, QUICK)


@pytest.mark.parametrize("what", ["info", "read"])
def test_a_hung_remote_is_given_up_at_the_deadline(place: Place, what: str) -> None:
    url = place.put("a", b"x")
    place.faults(hang=what)
    began = time.monotonic()
    with pytest.raises(RemoteError, match=r"hangs.*Patience\(timeout"):
        read(place.files(patience=Patience(timeout=0.2, attempts=2, first=0.01)), url)
    assert time.monotonic() - began < 60  # it would be asked for ever
    place.well()
    assert read(place.files(), url) == b"x"
    assert place.debris() == []


@pytest.mark.slow
def test_slow_is_not_hung(place: Place) -> None:
    url = place.put("a", b"x" * (CHUNK + 5))
    place.faults(latency=0.4)
    # Less than all requests take together; one during which the machine stands still is made again.
    patience = replace(QUICK, timeout=1.0, attempts=20)
    assert len(read(place.files(patience=patience), url)) == CHUNK + 5


@pytest.mark.parametrize("kit", [True, False])
def test_a_file_that_is_gone_is_said_at_once(place: Place, kit: bool) -> None:
    path = place.remote / "gone"
    with pytest.raises(RemoteFileMissing, match="no such file") as caught:
        read(place.files(), f"kit://{path}" if kit else str(path))
    assert isinstance(caught.value, FileNotFoundError)
    assert str(path) in str(caught.value)


def test_a_truncated_download_is_made_again_and_then_an_error(place: Place) -> None:
    url = place.put("a", b"0123456789")
    place.faults(truncate=4)
    with pytest.raises(RemoteError, match="ended after 4 of the 10 bytes"):
        read(place.files(), url)
    assert (place.debris(), place.size()) == ([], 0)
    place.well()
    assert read(place.files(), url) == b"0123456789"


@pytest.mark.parametrize("after", ["shorter", "x" * (2 * CHUNK)])
def test_a_file_that_changes_while_it_is_copied_is_copied_again(place: Place, after: str) -> None:
    url = place.put("a", content(1, CHUNK + 100))
    place.faults(after_read=after)
    assert read(place.files(), url) == after.encode()
    assert place.sum() == place.size() == len(after)


def test_a_file_that_is_removed_while_it_is_copied(place: Place) -> None:
    path = place.remote / "a"
    os.mkfifo(place.remote / "pipe")
    path.write_bytes(content(1, 3 * CHUNK))
    copied = Remote().chunks(str(path), Listing(3 * CHUNK, str(path.stat().st_mtime_ns)))
    first = next(copied)
    path.unlink()
    assert first + b"".join(copied) == content(1, 3 * CHUNK)  # a path: what is open stays readable
    with pytest.raises(RemoteError, match="regular file"):
        read(place.files(), str(place.remote / "pipe"))


def test_a_file_whose_size_nobody_knows(place: Place) -> None:
    url = place.put("a", content(1, 2 * CHUNK + 17))
    place.faults(no_size=True)
    files = place.files(limit=4 * CHUNK)
    assert [read(files, url) == content(1, 2 * CHUNK + 17) for _ in range(2)] == [True, True]
    assert (place.requests(), place.sum()) == (["a"], 2 * CHUNK + 17)


def test_out_of_descriptors_here(place: Place, tmp_path: Path) -> None:
    script = (
        "import os, resource, sys; from cache_kit import *\n"
        "files = CachedFiles(sys.argv[1], reserve_free=0, patience=QUICK)\n"
        "files.fetch(sys.argv[2]); resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); held = []\n"
        "try:\n"
        "    while True: held.append(os.open('/dev/null', 0))\n"
        "except OSError: pass\n"
        "with files.open(sys.argv[2]) as path: print(path)\n"
        "try: files.get(sys.argv[3])\n"
        "except OSError as error: print(error)\n"
    )
    local = place.remote / "here"
    local.write_bytes(b"x")
    arguments = [place.root, local, place.put("a", b"y")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments], cwd=Path(__file__).parent, capture_output=True
    )
    lines = done.stdout.decode().splitlines()
    assert lines[0] == str(local), done  # past the cache: the remote's own path takes no descriptor of ours
    assert "Too many open files" in lines[1] or "descriptors" in lines[1], done
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64


def test_whoever_waits_takes_over_from_a_downloader_that_was_killed(place: Place) -> None:
    url = place.put("a", content(1, 1000))
    place.faults(hang="read")
    other = _downloader(place, url)
    eventually(lambda: place.requests() == ["a"], 30)
    found: list[bytes] = []
    waiter = threading.Thread(target=lambda: found.append(read(place.files(), url)))
    waiter.start()
    other.send_signal(signal.SIGKILL)  # first: it must not get to its end
    other.wait(60)
    place.well()
    waiter.join(60)
    assert found == [content(1, 1000)]
    assert place.debris() == []


@pytest.mark.slow
def test_whoever_waits_passes_over_a_downloader_that_is_stopped(place: Place) -> None:
    url = place.put("a", content(1, 1000))
    place.faults(hang="read")
    other = _downloader(place, url)
    try:
        eventually(lambda: place.requests() == ["a"], 30)
        other.send_signal(signal.SIGSTOP)
        place.well()
        files = place.files(patience=replace(QUICK, stopped=1.5))
        assert read(files, url) == content(1, 1000)
        assert files.counters().waits == 1
        other.send_signal(signal.SIGCONT)  # it finds out that its file is nobody's any more
        assert other.wait(30) == 0
    finally:
        other.kill()
        other.wait(60)
    assert place.debris() == []
    assert place.sum() == place.size() == 1000


def _downloader(place: Place, url: str) -> subprocess.Popen[bytes]:
    script = (
        "import sys; from cache_kit import *; files = CachedFiles(sys.argv[1], reserve_free=0, patience=QUICK)\n"
        "with files.open(sys.argv[2]) as path: assert len(path.read_bytes()) == 1000"
    )
    return subprocess.Popen([sys.executable, "-c", script, place.root, url], cwd=Path(__file__).parent)


@pytest.mark.parametrize(("announced", "seen"), [(5, b"12345"), (4, b"12345"), (2, b"123"), (9, b"12345"), (0, b"1")])
def test_a_small_file_of_another_size_than_announced_shows(place: Place, announced: int, seen: bytes) -> None:
    path = place.remote / "a"
    path.write_bytes(b"12345")
    assert Remote().read(str(path), announced) == seen


def test_a_small_file_of_a_mount_takes_one_request(place: Place, tmp_path: Path) -> None:
    if why := slow_mount.why_not():
        pytest.skip(why)
    with slow_mount.SlowMount(place.remote, tmp_path / "mount") as mount:
        for number in range(3):
            place.put(f"{number}.bin", content(number, 100_000))
            assert read(place.files(), f"{mount.path}/{number}.bin") == content(number, 100_000)
        counted = mount.counts()
        assert (counted.opens, counted.reads, counted.bytes) == (3, 3, 300_000)
        with pytest.raises(UsageError, match="lies on FUSE"):
            CachedFiles(mount.path / "cache")


def test_a_source_that_is_left_behind_ends() -> None:
    gone = threading.Event()

    def endless() -> object:
        try:
            while True:
                yield b"x"
        finally:
            gone.set()

    items = patient.stream(Threads(), endless, 60.0, lambda: None)  # type: ignore[arg-type]
    assert [next(items) for _ in range(10)] == [b"x"] * 10
    items.close()  # type: ignore[attr-defined]
    assert gone.wait(60)


def test_real_drivers(place: Place) -> None:
    import zipfile

    import fsspec

    fsspec.filesystem("memory").pipe("/cache-test/b.txt", b"hello")
    archive = place.remote / "some.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("dir/in.txt", "inner")
    files = place.files()
    assert read(files, "memory://cache-test/b.txt") == b"hello"
    assert read(files, f"zip://dir/in.txt::{archive}") == b"inner"
    with pytest.raises(RemoteFileMissing):
        read(files, "memory://cache-test/none.txt")
    with pytest.raises(RemoteError, match="is a directory"):
        read(files, "memory://cache-test")


def test_a_cache_that_somebody_has_put_a_spade_to_still_gives_the_right_bytes(place: Place) -> None:
    urls = [place.put(f"{number}", content(number, 100)) for number in range(6)]
    files = place.files()
    for url in urls:
        read(files, url)
    (place.home / "gc.lock").write_bytes(b"junk" * 30)
    (place.home / "p" / "junk").write_bytes(b"x")
    (place.home / "t" / "directory").mkdir()
    (place.home / "p" / "directory").mkdir()
    for path in (place.home / "index").iterdir():
        path.write_bytes(b"\xff\n\n{} {}\n")
    first, second, *_ = sorted((place.home / "u").glob("*/*"))
    for path in (first, second):
        path.unlink()
    first.write_text("no link")
    following = place.files(trust=60)
    assert [read(following, url) for url in urls] == [content(number, 100) for number in range(6)]
    assert following.counters().bypasses == 0
    assert following.counters(node=True).fills == 8
    assert place.sum() == place.size() == 600


def test_missing_drivers_and_wrong_options_are_usage_errors(place: Place) -> None:
    with pytest.raises(UsageError, match="no-such-protocol"):
        read(place.files(), "no-such-protocol://x/y")
    assert QUICK.attempts == 3
