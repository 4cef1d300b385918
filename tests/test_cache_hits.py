"""What a process remembers of files that are there never stands between a reader and the right bytes."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

from cache_kit import Place, read

from ftrun.data.cache import hits, leases

if TYPE_CHECKING:
    import pytest


def test_an_object_that_went_is_fetched_again(place: Place) -> None:
    url = place.put("a.bin", b"first")
    files = place.files()
    assert [read(files, url) for _ in range(2)] == [b"first"] * 2
    assert place.files().make_room(1 << 62) > 0
    for each in place.files().cached():
        os.unlink(each.path)
    assert files.peek([url]) == [None]
    assert [read(files, url) for _ in range(2)] == [b"first"] * 2
    assert place.requests() == ["a.bin"] * 2
    shutil.rmtree(place.home / "o")
    assert [read(files, url) for _ in range(2)] == [b"first"] * 2


def test_an_object_that_is_damaged_is_fetched_again(place: Place) -> None:
    url = place.put("a.bin", b"first")
    files = place.files()
    assert [read(files, url) for _ in range(2)] == [b"first"] * 2
    (lies,) = files.cached()
    os.chmod(lies.path, 0o600)
    os.truncate(lies.path, 3)
    assert read(files, url) == b"first"


def test_a_run_that_asks_anew_notices_a_change(place: Place) -> None:
    url = place.put("a.bin", b"first")
    before = place.files()
    read(before, url)
    files = place.files()
    assert [read(files, url) for _ in range(2)] == [b"first"] * 2
    place.put("a.bin", b"second")
    # The next run of the node has learned it: this one goes on with what it knows, as it does everywhere.
    assert read(place.files(), url) == b"second"
    assert read(files, url) == b"first"
    files.revalidate([url])
    assert read(files, url) == b"second"


def test_a_name_is_remembered_as_it_is_given(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place.remote / "a.bin"
    path.write_bytes(b"here")
    files = place.files()
    monkeypatch.chdir(place.remote)
    names = [str(path), f"file://{path}", "a.bin", "../remote/a.bin"]
    assert [read(files, name) for name in names * 2] == [b"here"] * 8
    assert files.counters().fills == 1
    (place.remote / "other").mkdir()
    (place.remote / "other" / "a.bin").write_bytes(b"there")
    monkeypatch.chdir(place.remote / "other")
    assert read(files, "a.bin") == b"there"


def test_some_at_a_time_are_counted_one_by_one(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hits, "MOST", 4)
    urls = [place.put(f"{number}.bin", bytes([number])) for number in range(10)]
    files = place.files()
    for url in urls[:8]:
        files.fetch(url)
    for _ in range(2):
        leases = files.peek(urls)
        assert [lease is None for lease in leases] == [False] * 8 + [True] * 2
        for number, lease in enumerate(leases[:8]):
            assert lease is not None
            with lease as path:
                assert path.read_bytes() == bytes([number])
    counted = files.counters()
    assert (counted.hits, counted.misses, counted.fills) == (16, 0, 8)


def test_an_object_that_is_locked_for_a_while_is_waited_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    url = place.put("a.bin", b"first")
    files = place.files()
    files.fetch(url)
    (lies,) = files.cached()
    with open(lies.path, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as by whoever brought it in, and has no processor
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if sum(pauses) > 0.5:  # by its own clock: a machine that stands still uses none of its patience up
                fcntl.flock(held, fcntl.LOCK_UN)

        monkeypatch.setattr(leases, "time", SimpleNamespace(sleep=pause, time=time.time))
        assert read(files, url) == b"first"
        assert sum(pauses) > 0.5
    assert files.counters().bypasses == 0
    assert place.requests() == ["a.bin"]
