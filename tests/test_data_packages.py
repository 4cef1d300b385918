"""The loader over data sets of other packages, the real ones; skipped where a package isn't installed."""

from __future__ import annotations

import io
import random
import subprocess
import sys
import tarfile
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
from iterable_kit import Run

from ftrun.data.iterable.datasets import is_iterable, shards_of
from ftrun.data.iterable.others import check_loader, is_loader
from ftrun.data.loader import DataLoader
from ftrun.errors import StateMismatch, UsageError

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 24

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::UserWarning")


def rolled() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def killed(make: Any, workers: tuple[int, ...] = (0,), **options: Any) -> list[list[Any]]:
    dice = rolled()
    seen: list[list[Any]] = []
    states = None
    while len(seen) < STEPS:
        run = Run(make(), dice.choice([1, 2, 3, 4]), dice.choice(workers), collate_fn=list, **options).resume(states)
        seen += run.train(min(dice.randrange(1, 12), STEPS - len(seen)))
        states = run.states()
        run.close()
    return seen


def straight(make: Any, **options: Any) -> list[list[Any]]:
    return Run(make(), 1, 0, collate_fn=list, **options).train(STEPS)


# Hugging Face


def hugging_face(shards: int = 8, rows: int = 203) -> Any:
    datasets = pytest.importorskip("datasets")
    datasets.utils.logging.set_verbosity_error()
    return datasets.Dataset.from_dict({"x": range(rows), "t": [f"row {each}" for each in range(rows)]}), shards


def streaming() -> Any:
    dataset, shards = hugging_face()
    return dataset.to_iterable_dataset(num_shards=shards)


def odd(example: dict[str, Any]) -> bool:
    return bool(example["x"] % 3)


def doubled(example: dict[str, Any]) -> dict[str, Any]:
    return {"y": 2 * example["x"]}


def exploded(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": [each for x in batch["x"] for each in (x, x)], "t": [each for t in batch["t"] for each in (t, t)]}


def with_index(example: dict[str, Any], index: int) -> dict[str, Any]:
    return {"at": index}


PIPELINES = {
    "plain": lambda ds: ds,
    "map": lambda ds: ds.map(doubled),
    "filter": lambda ds: ds.filter(odd),
    "filter, map": lambda ds: ds.filter(odd).map(doubled),
    "batched map": lambda ds: ds.map(exploded, batched=True, batch_size=4),
    "map with indices": lambda ds: ds.map(with_index, with_indices=True),
    "select": lambda ds: ds.select_columns("x"),
    "torch": lambda ds: ds.map(doubled).with_format("torch"),
    "batched map, torch": lambda ds: ds.map(exploded, batched=True, batch_size=4).with_format("torch"),
    "batched map, numpy": lambda ds: ds.with_format("numpy").map(exploded, batched=True, batch_size=4),
    "shuffle": lambda ds: ds.shuffle(seed=5, buffer_size=10),
    "shuffle, map": lambda ds: ds.shuffle(seed=5, buffer_size=10).map(doubled),
    "batch": lambda ds: ds.batch(2),
}


def plainly(batches: list[list[Any]]) -> list[list[str]]:
    return [[repr(row) for row in batch] for batch in batches]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_hugging_face_streams_go_on_exactly(pipeline: str) -> None:
    def make() -> Any:
        return PIPELINES[pipeline](streaming())

    assert plainly(killed(make)) == plainly(straight(make))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_hugging_face_states_are_used_where_they_hold(pipeline: str) -> None:
    shards = shards_of(PIPELINES[pipeline](streaming()), 1, None)
    lossy = pipeline.startswith(("shuffle", "batched map, "))
    assert shards.states_hold is not lossy
    assert shards.count == 8


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["map", "shuffle"])
def test_hugging_face_streams_in_workers(pipeline: str) -> None:
    def make() -> Any:
        return PIPELINES[pipeline](streaming())

    assert plainly(killed(make, (1, 2))) == plainly(straight(make))


def test_hugging_face_streams_pass_over_all_samples() -> None:
    rows = [row["x"] for batch in Run(streaming(), 2, 0, batch=8, collate_fn=list).train(24) for row in batch]
    assert len(set(rows)) == 192


def test_a_hugging_face_shuffle_needs_a_seed() -> None:
    def run() -> Run:
        return Run(streaming().shuffle(buffer_size=10), 1, 0, collate_fn=list)

    before = run()
    before.train(1)
    with pytest.raises(StateMismatch, match="dataset"):
        run().resume(before.states())


def test_hugging_face_parts_and_too_many_shards() -> None:
    from_package = pytest.importorskip("datasets.distributed")
    with pytest.raises(UsageError, match="split_dataset_by_node"):
        Run(from_package.split_dataset_by_node(streaming(), 0, 2), 1, 0)
    with pytest.raises(UsageError, match=r"virtual_shards=9.*has 8"):
        Run(streaming(), 1, 0, virtual_shards=9)


def test_hugging_face_map_style_is_one_by_index() -> None:
    dataset, _ = hugging_face()
    assert not is_iterable(dataset)
    loader: DataLoader[Any] = DataLoader(dataset, global_batch=24, shuffle=True, seed=3, collate_fn=list)
    rows = [row["x"] for batch in loader for row in batch]
    assert len(set(rows)) == 192
    assert rows == [
        row["x"]
        for batch in DataLoader(dataset, global_batch=24, shuffle=True, seed=3, collate_fn=list)
        for row in batch
    ]


FINGERPRINT = """
    import sys; sys.path.insert(0, "tests")
    import datasets
    from ftrun.data.position import fingerprint
    from ftrun.data.loader import DataLoader
    def double(row): return {"y": 2 * row["x"]}
    plain = datasets.Dataset.from_dict({"x": list(range(50))})
    for each in (plain, plain.map(double), plain.filter(lambda row: row["x"] > 2), plain.shuffle(seed=3)):
        print(DataLoader(each, global_batch=2).recipe.dataset)
    print(DataLoader(plain.to_iterable_dataset(4).shuffle(seed=3), global_batch=2).recipe.dataset)
"""


@pytest.mark.slow
def test_hugging_face_fingerprints_are_those_of_the_package() -> None:
    pytest.importorskip("datasets")
    command = [sys.executable, "-c", textwrap.dedent(FINGERPRINT)]
    first, second = (subprocess.run(command, capture_output=True, text=True, timeout=120) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert len(set(first.stdout.split())) == 5


# WebDataset


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["txt"])


def tars(tmp_path: Path) -> list[str]:
    pytest.importorskip("webdataset")
    for shard in range(8):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as archive:
            for number in range(20):
                content = str(100 * shard + number).encode()
                member = tarfile.TarInfo(f"{shard:03}{number:03}.txt")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return [str(tmp_path / f"{shard}.tar") for shard in range(8)]


def pipeline(urls: list[str], shuffled: int, *, detshuffle: bool = False) -> Any:
    import webdataset

    made = webdataset.WebDataset(urls, shardshuffle=100, detshuffle=detshuffle).shuffle(shuffled)
    return made.decode().map(number_of)


@pytest.mark.parametrize("shuffled", [0, 7])
def test_webdataset_pipelines_go_on_exactly(tmp_path: Path, shuffled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = tars(tmp_path)
    # With these the package itself would split, or refuse to.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def make() -> Any:
        return pipeline(urls, shuffled)

    batches = straight(make)
    assert killed(make) == batches
    assert len({each for batch in batches[:4] for each in batch}) == 96
    in_order = sorted(batches[0][:12]) == batches[0][:12]
    assert in_order is not bool(shuffled)


@pytest.mark.slow
def test_webdataset_pipelines_in_workers(tmp_path: Path) -> None:
    urls = tars(tmp_path)

    def make() -> Any:
        return pipeline(urls, 7, detshuffle=True)

    assert killed(make, (1, 2)) == straight(make)


def test_webdataset_pipelines_that_can_not_be_exact(tmp_path: Path) -> None:
    urls = tars(tmp_path)
    import webdataset

    with pytest.raises(UsageError, match=r"begins with ResampledShards.*without\s+resampling.*TarShards"):
        Run(webdataset.WebDataset(urls, resampled=True), 1, 0)
    with pytest.raises(UsageError, match=r"with_epoch\(\) and repeat\(\)"):
        Run(pipeline(urls, 0).with_epoch(100), 1, 0)


def test_our_reader_gives_what_webdataset_gives(tmp_path: Path) -> None:
    from ftrun.data.iterable.tar import TarShards

    urls = tars(tmp_path)
    import webdataset

    theirs = list(webdataset.WebDataset(urls, shardshuffle=False))
    ours = [sample for shard in range(8) for sample in TarShards(urls).shard(shard, 8)]
    assert [each["txt"] for each in ours] == [each["txt"] for each in theirs]
    assert [each["__key__"] for each in ours] == [each["__key__"] for each in theirs]


# torchdata


class Counting:
    def __iter__(self) -> Any:
        return iter(range(100))


def stateful(workers: int) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(list(range(100)), batch_size=4, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_of_torchdata_is_held_to_its_ranks_and_workers(workers: int) -> None:
    loader = stateful(workers)
    next(iter(loader))
    state = loader.state_dict()
    assert is_loader(loader)
    check_loader("loader", stateful(workers), state, (2, 2), "start over with --fresh")
    with pytest.raises(
        StateMismatch, match="StatefulDataLoader, and its position is each rank's own: it was taken on 2"
    ):
        check_loader("loader", stateful(workers), state, (2, 3), "start over with --fresh")
    with pytest.raises(StateMismatch, match=rf"that was {workers}, and is 2 now\. Make it with num_workers={workers}"):
        check_loader("loader", stateful(2), state, (2, 2), "start over with --fresh")


def test_which_tracked_objects_are_loaders_of_others() -> None:
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    assert not is_loader(torch.optim.lr_scheduler.StepLR(optimizer, 3))
    assert not is_loader(DataLoader([1, 2, 3], batch_size=1))
    assert is_loader(Counting())
