from __future__ import annotations

import io
import json
import pickle
import random
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
from iterable_kit import Run

from ftrun.data.cache.files import CachedFiles
from ftrun.data.iterable import tar_index
from ftrun.data.iterable.tar import TarShards
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def write(path: Path, first: int, count: int, mode: Any = "w", *, extra: tuple[str, ...] = ()) -> Path:
    """Samples of two parts each, with names as they come in the wild."""
    with tarfile.open(path, mode) as archive:
        archive.addfile(directory("some"))
        for name in extra:
            add(archive, name, b"")
        for number in range(first, first + count):
            long = "n" * (150 if number % 5 == 0 else 1)
            add(archive, f"some/{long}{number:05}.left.TXT", f"left {number}".encode())
            add(archive, f"some/{long}{number:05}.cls", str(number).encode() * (number % 3))
    return path


def directory(name: str) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = tarfile.DIRTYPE
    return made


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def number_of(sample: dict[str, Any]) -> int:
    number = int(sample["left.txt"].split()[1])
    assert sample["cls"] == str(number).encode() * (number % 3)
    assert sample["__key__"].endswith(f"{number:05}")
    assert len(sample) == 3
    return number


@pytest.fixture
def tars(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / f"{number}.tar", number * 100, 20 + number % 3) for number in range(16)]


def run(tars: list[Path], world: int = 1, workers: int = 0, **options: Any) -> Run:
    return Run(TarShards(tars, decode=number_of, **options), world, workers, collate_fn=list)


def index_all(tars: list[Path]) -> None:
    for each in tars:
        tar_index.write(each)


@pytest.mark.parametrize("indexed", [False, True])
def test_tars_go_on_exactly(tars: list[Path], *, indexed: bool) -> None:
    if indexed:
        index_all(tars)
    straight = run(tars).train(20)
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    seen, states = [], None
    while len(seen) < 20:
        part = run(tars, dice.choice([1, 2, 3, 4])).resume(states)
        seen += part.train(min(dice.randrange(1, 8), 20 - len(seen)))
        states = part.states()
    assert seen == straight
    if indexed:
        assert "shards" not in (states or [{}])[0]


def test_with_indexes_an_epoch_has_each_sample_once(tars: list[Path]) -> None:
    index_all(tars)
    assert len(run(tars).loaders[0]) == (16 * 20 + 15) // 24
    numbers = [number for batch in run(tars).train(13) for number in batch]
    assert len(set(numbers)) == 13 * 24
    tars[3].with_name("3.tar.index").unlink()
    with pytest.raises(TypeError):
        len(run(tars).loaders[0])


@pytest.mark.slow
def test_tars_in_workers(tars: list[Path]) -> None:
    index_all(tars)
    straight = run(tars).train(13)
    first = run(tars, 2, 2)
    seen = first.train(5)
    states = first.states()
    first.close()
    assert seen + run(tars, 1, 1).resume(states).train(8) == straight


@pytest.mark.parametrize("number", [0, 1, 19, 20, 25, 41, 45])
@pytest.mark.parametrize("indexed", [False, True])
def test_seeks_through_the_files_of_a_shard(tars: list[Path], number: int, *, indexed: bool) -> None:
    if indexed:
        index_all(tars)
    dataset = TarShards(tars, decode=number_of)
    everything = list(dataset.shard(0, 8))
    assert everything == [*range(20), *range(800, 822)]
    piece = dataset.shard(0, 8)
    piece.seek(number)
    assert list(piece) == everything[number:]


def test_a_seek_with_an_index_reads_nothing_before(tars: list[Path]) -> None:
    index_all(tars)
    content = bytearray(tars[0].read_bytes())
    place = tar_index.read(tars[0].with_name("0.tar.index"), len(content)).offsets[15]
    content[:place] = b"\xff" * place
    tars[0].write_bytes(content)
    piece = TarShards(tars, decode=number_of).shard(0, 16)
    piece.seek(15)
    assert list(piece) == list(range(15, 20))


def test_compressed_tars_are_read_from_the_start(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar.gz", 0, 10, "w:gz")
    piece = TarShards([path], decode=number_of).shard(0, 1)
    piece.seek(4)
    assert list(piece) == list(range(4, 10))
    with pytest.raises(UsageError, match=r"a\.tar\.gz can't be indexed.*compressed"):
        tar_index.write(path)


def test_members_that_belong_to_no_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", 0, 3, extra=("README", ".hidden", "some/.also.hidden"))
    assert list(TarShards([path], decode=number_of).shard(0, 1)) == [0, 1, 2]
    assert len(tar_index.write(path).offsets) == 3
    assert tar_index.key_of("a.b/c.d.E") == ("a.b/c", "d.e")


class Trap:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("unpickled",))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    content = pickle.dumps(Trap())
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "1.pyd", content)
    assert next(iter(TarShards([tmp_path / "a.tar"]).shard(0, 1)))["pyd"] == content


def test_damaged_tars_and_indexes(tars: list[Path]) -> None:
    index_all(tars)
    index = tars[0].with_name("0.tar.index")
    lines = index.read_text().splitlines()
    tars[0].write_bytes(tars[0].read_bytes()[:-10240] + b"x" * 3000)
    piece = TarShards(tars, decode=number_of).shard(0, 16)
    piece.seek(3)
    with pytest.raises(UsageError, match=r"0\.tar\.index is the index of a tar file of .* Make the index anew"):
        list(piece)
    for text in ("", "{}", "[]", lines[0], f"{lines[0]}\n[1, 2]", f"{lines[0]}\n[1, null]"):
        index.write_text(text)
        with pytest.raises(UsageError, match="is no index of a tar file"):
            tar_index.read(index, json.loads(lines[0])["size"])
    index.write_text("{}")
    with pytest.raises(UsageError, match="is no index of a tar file"):
        TarShards(tars).shard_lengths(16)


@pytest.mark.parametrize("damage", [lambda good: good[:-10240] + b"x" * 3000, lambda good: good[: 512 * 9]])
def test_a_damaged_tar_is_no_end(tars: list[Path], damage: Callable[[bytes], bytes]) -> None:
    tars[0].write_bytes(damage(tars[0].read_bytes()))
    with pytest.raises(tarfile.TarError, match=r"damaged|cut off") as caught:
        list(TarShards(tars).shard(0, 16))
    assert any("0.tar" in note for note in caught.value.__notes__)
    with pytest.raises(UsageError, match="can't be indexed"):
        tar_index.write(tars[0])


def test_bad_lists_of_tars() -> None:
    with pytest.raises(UsageError, match="give a list"):
        TarShards("a.tar")
    with pytest.raises(UsageError, match="no tar files"):
        TarShards([])
    with pytest.raises(UsageError, match=r"is no local file: give TarShards\(\.\.\., cache="):
        TarShards(["s3://bucket/a.tar"])
    with pytest.raises(UsageError, match="can't be 3 shards"):
        TarShards(["a.tar"]).shard(0, 3)


def test_tars_through_the_cache(tars: list[Path], tmp_path: Path) -> None:
    index_all(tars)
    cache = CachedFiles(tmp_path / "cache", reserve_free=0)
    urls = [each.as_uri() for each in tars]
    dataset = pickle.loads(pickle.dumps(TarShards(urls, decode=number_of, cache=cache)))
    assert sum(dataset.shard_lengths(16)) == 335
    assert list(dataset.shard(1, 16)) == list(range(100, 121))


def test_indexes_are_made_by_a_command(tars: list[Path]) -> None:
    command = [sys.executable, "-m", "ftrun.data.iterable.tar_index", *map(str, tars)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert made.stdout == "335 samples\n"
    bad = tars[0].with_name("bad.tar")
    bad.write_bytes(b"no tar")
    made = subprocess.run([*command[:3], str(bad)], capture_output=True, text=True, timeout=60)
    assert made.returncode == 2
    assert "bad.tar can't be indexed" in made.stderr
