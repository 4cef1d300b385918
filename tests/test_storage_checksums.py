"""Checksums: of a whole from its parts, and of chunks while they are read."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from ftrun.checkpoint import checksums
from ftrun.checkpoint.checksums import CHUNK, Checksums, FileRecord, combine, read_verified_into, whole
from ftrun.checkpoint.layout import Root
from ftrun.errors import CorruptCheckpoint

if TYPE_CHECKING:
    from pathlib import Path


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_checksums_make_one(first: bytes, second: bytes) -> None:
    assert combine(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


@pytest.mark.parametrize("length", [2**16 - 1, 2**20, 10**6 + 7])
def test_checksums_of_long_runs(length: int) -> None:
    first, second = random.Random(1).randbytes(5), random.Random(2).randbytes(length)
    assert combine(crc32c(first), crc32c(second), length) == crc32c(first + second)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 12345])
def test_a_record_says_the_same_however_the_bytes_come(size: int) -> None:
    data = random.Random(size).randbytes(size)
    chunks = tuple(crc32c(data[start : start + CHUNK]) for start in range(0, size, CHUNK))
    sums = Checksums()
    position = 0
    for step in (1, 1000, 5 * 2**20 + 3, size):
        sums.update(memoryview(data)[position : position + step])
        position += step
    sums.update(data[position:])
    assert sums.record() == checksums.record_of(data) == FileRecord(size, crc32c(data), chunks)
    assert whole(chunks, size) == crc32c(data)
    assert FileRecord.from_json(sums.record().to_json()) == sums.record()


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Root, bytes, FileRecord]:
    root = Root.open(tmp_path)
    data = random.Random(0).randbytes(2 * CHUNK + 1000)
    root.put("x", lambda: iter([memoryview(data)]), len(data))
    return root, data, checksums.record_of(data)


def test_whole_chunks_are_read_and_verified_in_place(stored: tuple[Root, bytes, FileRecord]) -> None:
    root, data, record = stored
    with root.opened("x") as file:
        for first, last in ((0, 1), (1, 2), (0, 2), (2, 3), (1, 3), (0, 3), (3, 3)):
            end = min(last * CHUNK, len(data))
            target = bytearray(end - min(first * CHUNK, end))
            if first < 3:
                read_verified_into(file, record, first, memoryview(target), attempt="a", name="x")
                assert target == data[first * CHUNK : end]
        for first, size in ((0, 5), (2, 999), (2, 1001), (0, CHUNK + 1)):
            with pytest.raises(ValueError, match="no whole chunks"):
                read_verified_into(file, record, first, memoryview(bytearray(size)), attempt="a", name="x")


def test_damage_is_named_with_its_chunk_and_bytes(stored: tuple[Root, bytes, FileRecord]) -> None:
    root, data, record = stored
    damaged = bytearray(data)
    damaged[CHUNK + 5] ^= 1
    (root.path / "x").write_bytes(damaged)
    target = memoryview(bytearray(len(data)))
    with root.opened("x") as file:
        read_verified_into(file, record, 0, target[:CHUNK], attempt="a", name="x")
        read_verified_into(file, record, 2, target[:1000], attempt="a", name="x")
        with pytest.raises(CorruptCheckpoint, match=r"x chunk 1 \(bytes 16777216 to 33554431\) fails") as caught:
            read_verified_into(file, record, 0, target, attempt="a", name="x")
    assert caught.value.attempt == "a"
    (root.path / "x").write_bytes(data[: 2 * CHUNK + 1])
    with root.opened("x") as file, pytest.raises(CorruptCheckpoint, match=f"x ends before its {len(data)} bytes"):
        read_verified_into(file, record, 2, target[:1000], attempt="a", name="x")


@pytest.mark.parametrize("crc", [None, 7, "", "0000000", "000000000", "0000000G", "0000000A", "00000,00", "0x000000"])
def test_what_is_no_checksum(crc: object) -> None:
    good = {"size": 1, "crc32c": "00000000", "chunks": ["00000000"]}
    for document in (good | {"crc32c": crc}, good | {"chunks": [crc]}):
        with pytest.raises(ValueError, match="is no checksum"):
            FileRecord.from_json(document)
    assert FileRecord.from_json(good) == FileRecord(1, 0, (0,))
