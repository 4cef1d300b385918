"""A cache in which somebody has put something else where its files and directories belong, or has spoilt them."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cache_kit import Place, content
from typer.testing import CliRunner

from ftrun.cli.cache import app
from ftrun.data.cache import regular
from ftrun.data.cache.layout import OtherVersion
from ftrun.data.cache.names import key_of
from ftrun.data.cache.remote import Remote

if TYPE_CHECKING:
    from collections.abc import Callable

FILES = 4


def filled(place: Place) -> list[str]:
    urls = [place.put(f"{number}.bin", content(number, 300 + number)) for number in range(FILES)]
    files = place.files()
    for url in urls:
        files.fetch(url)
    return urls


def _first(path: Path) -> Path:
    return min(path.iterdir())


PLACES: dict[str, Callable[[Path], Path]] = {
    "objects": lambda home: home / "o",
    "shard": lambda home: _first(home / "o"),
    "object": lambda home: _first(_first(home / "o")),
    "pointers": lambda home: home / "u",
    "pointer shard": lambda home: _first(home / "u"),
    "pointer": lambda home: _first(_first(home / "u")),
    "temporary files": lambda home: home / "t",
    "pointer in the making": lambda home: home / "t" / "pointer",
    "pages": lambda home: home / "p",
    "page": lambda home: _first(home / "p"),
    "total": lambda home: home / "p" / "total",
    "total in the making": lambda home: home / "p" / "total.new",
    "indices": lambda home: home / "index",
    "index": lambda home: _first(home / "index"),
    "lock": lambda home: home / "gc.lock",
}
"""What lies in a cache."""
STAYS = {("object", "directory"), ("pointer", "directory")}
"""What is read past the cache for as long as it stands there."""


def _spoil(path: Path, how: str) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if how == "file":
        path.touch()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "link":
        path.symlink_to("/nowhere/at/all")
    elif how == "directory":
        path.mkdir()
        (path / "something").mkdir()


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:data cache:RuntimeWarning")
@pytest.mark.parametrize("how", ["file", "pipe", "directory"])
@pytest.mark.parametrize("what", PLACES)
def test_what_belongs_elsewhere_is_got_round(place: Place, what: str, how: str) -> None:
    urls = filled(place)
    _spoil(PLACES[what](place.home), how)
    urls.append(place.put("new.bin", content(FILES, 300 + FILES)))
    files = place.files(trust=60)
    for number, url in enumerate(urls):
        with files.open(url) as path:
            assert path.read_bytes() == content(number, 300 + number)
    assert (files.counters().bypasses > 0) == ((what, how) in STAYS)
    for command in ("ls", "verify", "clear"):
        result = CliRunner().invoke(app, [command, "--root", str(place.root)])
        assert result.exit_code == 0, (command, result.output)
    assert place.size() == place.sum() == 0


@pytest.mark.parametrize("how", ["pipe", "link", "directory"])
def test_a_version_that_cannot_be_read_is_refused_with_the_way_out(place: Place, how: str) -> None:
    filled(place)
    _spoil(place.home / "VERSION", how)
    with pytest.raises(OtherVersion, match=r"ftrun cache clear --root"):
        place.files()
    assert CliRunner().invoke(app, ["clear", "--root", str(place.root)]).exit_code == 0
    assert not place.home.exists()


def test_a_directory_where_a_file_belongs_costs_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="is no regular file"):
        regular.read(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_of_somebody_elses_is_not_cleared(place: Place) -> None:
    filled(place)
    (place.home / "thesis.tex").touch()
    (place.home / "VERSION").unlink()
    for _ in range(2):
        assert CliRunner().invoke(app, ["clear", "--root", str(place.root)]).exit_code == 2
        place.home.chmod(0o755)
    assert (place.home / "thesis.tex").exists()


def test_a_sum_that_was_changed_by_hand_is_counted_afresh(place: Place) -> None:
    filled(place)
    lock = place.home / "gc.lock"
    data = bytearray(lock.read_bytes())
    data[8] ^= 64
    lock.write_bytes(data)
    place.files().sweep()
    assert place.sum() == place.size() > 0


def test_a_download_that_was_killed_at_its_end_is_taken_over_by_its_user() -> None:
    """Root may write to what nobody may write to: this is about all others."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        place = Place(Path(name))
        url = str(place.remote / "a")
        place.put("a", b"whole")
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                files = place.files()
                assert not files.has(url)
                left = place.home / "t" / key_of(url, Remote().stat(url))
                left.write_bytes(b"who")
                left.chmod(0o400)
                with files.open(url) as path:
                    assert path.read_bytes() == b"whole"
                assert (files.counters().bypasses, place.debris()) == (0, [])
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_next_run_notices_a_flipped_bit(place: Place) -> None:
    urls = filled(place)
    for victim in (place.home / "o").glob("*/*"):
        data = bytearray(victim.read_bytes())
        data[17] ^= 1
        victim.chmod(0o600)
        victim.write_bytes(data)
    files = place.files()
    with pytest.warns(RuntimeWarning, match="is damaged"):
        leases = [files.get(url) for url in urls]
    for number, lease in enumerate(leases):
        assert lease.path.read_bytes() == content(number, 300 + number)
    assert (files.counters().fills, files.counters().bypasses) == (FILES, 0)
    assert place.sum() == place.size()


def test_an_object_whose_line_was_lost_is_known_by_its_pointer(place: Place) -> None:
    filled(place)
    shutil.rmtree(place.home / "index")
    result = CliRunner().invoke(app, ["verify", "--root", str(place.root)])
    assert (result.exit_code, "0 damaged" in result.output) == (0, True)
    victim = PLACES["object"](place.home)
    victim.chmod(0o600)
    victim.write_bytes(bytes(victim.stat().st_size))
    assert CliRunner().invoke(app, ["verify", "--root", str(place.root)]).exit_code == 1
