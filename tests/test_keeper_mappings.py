"""Payloads stay mapped from save to save, and no longer than their files are there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ftrun.checkpoint.checksums import record_of
from ftrun.checkpoint.keeper.copying import Copier, Source, SourceError
from ftrun.checkpoint.keeper.faults import Faults
from ftrun.checkpoint.keeper.mappings import Mappings
from ftrun.checkpoint.keeper.rate import Limiter, Meter
from ftrun.checkpoint.storage.posix import PosixStorage

if TYPE_CHECKING:
    from pathlib import Path


def mapped(mappings: Mappings, path: Path, size: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return bytes(mappings.of(str(path), descriptor, size)[:size])
    finally:
        os.close(descriptor)


def test_a_file_is_mapped_once_and_read_as_it_is_now(tmp_path: Path) -> None:
    mappings, path = Mappings(), tmp_path / "0.safetensors"
    path.write_bytes(b"first" * 2000)
    assert mapped(mappings, path, 10_000) == b"first" * 2000
    with path.open("r+b") as file:
        file.write(b"again" * 2000)
    assert mapped(mappings, path, 10_000) == b"again" * 2000
    os.truncate(path, 5)
    assert mapped(mappings, path, 5) == b"again"
    assert len(mappings) == 1


def test_another_file_of_that_name_is_another(tmp_path: Path) -> None:
    mappings, path, other = Mappings(), tmp_path / "0.safetensors", tmp_path / "1.safetensors"
    path.write_bytes(b"first")
    mapped(mappings, path, 5)
    (tmp_path / "new").write_bytes(b"other")
    (tmp_path / "new").replace(path)
    assert mapped(mappings, path, 5) == b"other"
    path.unlink()
    other.write_bytes(b"third")
    assert mapped(mappings, other, 5) == b"third"
    assert len(mappings) == 1, "what is gone is let go of"


def test_copies_of_one_slot_after_the_other(tmp_path: Path) -> None:
    path, storage, mappings = tmp_path / "0.safetensors", PosixStorage(tmp_path / "root"), Mappings()

    def copy(directory: str, wanted: bytes) -> bytes:
        source = Source(str(path), record_of(wanted), slot=True)
        copier = Copier(Limiter(None), Meter(len(wanted)), Faults.from_environment({}), "root", mappings)
        copier.copy(storage, directory, {"r00000.0.safetensors": source}, {})
        return storage.read(f"{directory}/r00000.0.safetensors")

    for number in range(3):
        content = bytes([number]) * 100_000
        path.write_bytes(content)  # the same file, with other bytes
        assert copy(f"a{number}", content) == content
    with pytest.raises(SourceError, match="fails its checksum"):
        copy("b", bytes(100_000))
    path.write_bytes(b"short")
    with pytest.raises(SourceError, match="has 5 bytes instead of 100000"):
        copy("c", bytes(100_000))
