"""``ftrun cache ls | verify | clear``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cache_kit import Place
from typer.testing import CliRunner

from ftrun.cli.cache import app


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    files = made.files()
    for name, data in (("a.jpg", b"one"), ("b\n.jpg", b"three")):
        files.fetch(made.put(name, data))
    return made


def ran(place: Place, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments, "--root", str(place.root)])
    print(result.output)
    assert result.exit_code == code, result.output
    return result.output


def test_ls(place: Place) -> None:
    out = ran(place, "ls")
    assert "2 files, 8 B" in out
    assert "2 downloads of 8 B" in out
    document = json.loads(ran(place, "ls", "--json"))
    assert document["counters"]["fills"] == 2
    assert sorted(each["size"] for each in document["files"]) == [3, 5]
    assert {each["url"] for each in document["files"]} == {
        f"kit://{place.remote}/{name}" for name in ("a.jpg", "b\n.jpg")
    }


def test_verify_finds_a_flipped_bit_and_repairs_it(place: Place) -> None:
    assert "2 files, 8 B read, 0 damaged" in ran(place, "verify")
    victim = next(Path(each.path) for each in place.files().cached() if each.size == 3)
    victim.chmod(0o600)
    victim.write_bytes(b"onf")
    out = ran(place, "verify", code=1)
    assert "DAMAGED" in out
    assert "a.jpg: CRC32C" in out
    assert "1 damaged, 1 thrown away" in ran(place, "verify", "--repair")
    assert "1 file, 5 B read, 0 damaged" in ran(place, "verify")
    with place.files().open(f"kit://{place.remote}/a.jpg") as path:
        assert path.read_bytes() == b"one"


def test_clear_leaves_what_is_in_use(place: Place) -> None:
    lease = place.files().get(f"kit://{place.remote}/a.jpg")
    assert "1 file thrown away, 5 B; 1 file in use and kept" in ran(place, "clear")
    lease.release()
    assert "1 file thrown away, 3 B" in ran(place, "clear")
    assert place.size() == place.sum() == 0


def test_clear_throws_away_another_version(place: Place) -> None:
    (place.home / "VERSION").write_text("99")
    assert "newer version" in ran(place, "ls", code=2)
    ran(place, "clear")
    assert not place.home.exists()
    assert "no data cache of yours" in ran(place, "ls", code=2)


def test_the_directory_inside_is_an_easy_mistake(place: Place) -> None:
    result = CliRunner().invoke(app, ["ls", "--root", str(place.home)])
    assert result.exit_code == 2
    assert f"({place.root}, perhaps)" in result.output


def test_nothing_here_imports_torch() -> None:
    script = "import sys, ftrun.cli.cache, ftrun.data.cache.files, ftrun.data.cache.upkeep, ftrun.data.cache.packed; "
    script += "assert not {'torch', 'fsspec'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
