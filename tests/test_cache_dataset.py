"""Packed strings, and a dataset of files that are somewhere else."""

from __future__ import annotations

import multiprocessing
import pickle
import random
from pathlib import Path

import pytest
from cache_kit import Place, content

from ftrun.data.cache.packed import PackedStrings
from ftrun.errors import UsageError


def test_packed_strings_are_a_sequence() -> None:
    texts = ["", "a", "ünï", "x" * 1000, "\udcff", ""]
    packed = PackedStrings(texts)
    assert list(packed) == texts
    assert [packed[-1], packed[-3]] == ["", "x" * 1000]
    assert packed[1:4] == texts[1:4]
    assert pickle.loads(pickle.dumps(packed)) == packed
    assert packed.digest() != PackedStrings(["", "aü", "nï", "x" * 1000, "\udcff", ""]).digest()
    assert list(PackedStrings([])) == []
    for wrong in (6, -7):
        with pytest.raises(IndexError):
            packed[wrong]
    with pytest.raises(TypeError, match="item 1 is int"):
        PackedStrings(["a", 1])  # type: ignore[list-item]


def _private(reads: int, texts: object, answers: multiprocessing.Queue[tuple[int, int]]) -> None:
    before = _dirty()
    chosen = random.Random(reads)
    for _ in range(reads):
        texts[chosen.randrange(1_000_000)]  # type: ignore[index]
    answers.put((before, _dirty()))


def _dirty() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty"))


@pytest.mark.slow
def test_a_million_strings_stay_shared_with_forked_workers() -> None:
    packed = PackedStrings(f"s3://bucket/train/{number:012}.jpg" for number in range(1_000_000))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_private, args=(200_000, packed, answers))
    child.start()
    before, after = answers.get(timeout=60)
    child.join(20)
    print(f"{(after - before) / 1e6:.2f} MB became private")
    # In a list of strings nearly all of 100 MB; whatever else this process has may come along, by the mebibyte.
    assert after - before < 10_000_000


def _decode(path: Path) -> bytes:
    data = path.read_bytes()
    if data == b"broken":
        raise ValueError("no picture")
    return data


def test_a_dataset_of_files(place: Place) -> None:
    from ftrun.data.cache.dataset import CachedDataset

    urls = [place.put(f"{number}", content(number, 100 + number)) for number in range(10)]
    dataset = CachedDataset(urls, _decode, place.files(), labels=list(range(10)))
    assert len(dataset) == 10
    assert dataset[3] == (content(3, 103), 3)
    assert dataset.__getitems__([1, 5, 3, 9]) == [(content(number, 100 + number), number) for number in (1, 5, 3, 9)]
    assert sorted(place.requests()) == ["1", "3", "5", "9"]
    other = pickle.loads(pickle.dumps(dataset))
    assert (other[7], other.fingerprint) == (dataset[7], dataset.fingerprint)
    assert CachedDataset(urls[::-1], _decode, place.files()).fingerprint != dataset.fingerprint
    with pytest.raises(IndexError):
        dataset[10]


def test_a_sample_that_fails_is_named(place: Place) -> None:
    from ftrun.data.cache.dataset import CachedDataset

    urls = [place.put("good", b"x"), place.put("bad", b"broken"), f"kit://{place.remote}/gone"]
    dataset = CachedDataset(urls, _decode, place.files())
    with pytest.raises(ValueError, match="no picture") as caught:
        dataset[1]
    assert caught.value.__notes__ == [f"sample 1 of the dataset: {urls[1]}"]
    with pytest.raises(FileNotFoundError, match="gone"):
        dataset[2]


def test_what_is_no_dataset_is_refused(place: Place) -> None:
    from ftrun.data.cache.dataset import CachedDataset

    files = place.files()
    for urls, decode, labels in (
        ("s3://one/string", _decode, None),
        (["a", 3], _decode, None),
        (["a"], "decode", None),
        (["a"], _decode, [1, 2]),
    ):
        with pytest.raises(UsageError):
            CachedDataset(urls, decode, files, labels=labels)  # type: ignore[arg-type]


@pytest.mark.slow
def test_workers_of_a_loader_share_one_download(place: Place) -> None:
    from torch.utils.data import DataLoader

    from ftrun.data.cache.dataset import CachedDataset

    urls = [f"file://{place.remote / str(number)}" for number in range(40)]
    for number in range(40):
        place.put(str(number), content(number, 100))
    dataset = CachedDataset(urls, _decode, place.files())
    loader = DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=list)
    for _ in range(2):
        assert [sample for batch in loader for sample in batch] == [content(number, 100) for number in range(40)]
    total = place.files().counters(node=True)
    assert (total.fills, total.bytes, total.bypasses) == (40, 4000, 0)
