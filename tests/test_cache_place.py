"""Where the data cache lies when nobody says so."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ftrun.data.cache import settings
from ftrun.data.cache.files import CachedFiles
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

NO_DISK = "/proc/self"  # what a home directory on NFS is for a cache


def test_a_home_on_no_local_disk_is_no_place_and_the_place_for_temporary_files_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    temporary = {"XDG_CACHE_HOME": NO_DISK, "TMPDIR": str(tmp_path)}
    own = tmp_path / f"ftrun-cache-{os.geteuid()}"
    assert settings.read(temporary | {"LOCAL_RANK": "1"}).root == own
    assert not caplog.messages  # the first rank of the node says it
    for _ in range(2):
        assert settings.read(temporary).root == own
    (said,) = caplog.messages
    assert str(own) in said
    assert f"{NO_DISK}/ftrun/data lies on proc" in said
    assert own.stat().st_mode & 0o777 == 0o700
    # A place that somebody has named is used, or refused with the reason.
    assert str(settings.read(temporary | {"FTRUN_CACHE": "/named"}).root) == "/named"
    with pytest.raises(UsageError, match="lies on proc"):
        CachedFiles(f"{NO_DISK}/cache")


def test_a_directory_that_others_have_put_there_is_not_used(tmp_path: Path) -> None:
    own = tmp_path / f"ftrun-cache-{os.geteuid()}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    own.symlink_to(elsewhere)
    temporary = {"XDG_CACHE_HOME": NO_DISK, "TMPDIR": str(tmp_path), "LOCAL_RANK": "1"}
    assert settings.for_a_while(temporary, others=()) is None
    own.unlink()
    own.mkdir(mode=0o777)
    own.chmod(0o777)
    assert settings.for_a_while(temporary, others=()) is None
    own.chmod(0o700)
    assert settings.for_a_while(temporary, others=()) == own


def test_a_home_that_is_missing_or_not_ones_own(tmp_path: Path) -> None:
    usual = settings.read({"XDG_CACHE_HOME": str(tmp_path / "made" / "later")})
    assert usual.root == tmp_path / "made" / "later" / "ftrun" / "data"
    assert not (tmp_path / "made").exists()
