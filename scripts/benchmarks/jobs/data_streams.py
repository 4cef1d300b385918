"""MosaicML's streaming and litdata: the same samples in files of their own kind."""

from __future__ import annotations

import importlib.machinery
import sys
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import data_loaders
import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MDS, _CHUNKS = "mds", "litdata"


def _streaming() -> Any:
    """Import it. It imports torchvision for data sets of pictures, whose wheel falls without CUDA's libraries."""
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        made: Any = types.ModuleType(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        made.__path__ = []
        made.VisionDataset, made.to_tensor = object, None
        sys.modules.setdefault(name, made)
    import streaming

    # What a run that was killed has left in shared memory would be an error at the next start.
    streaming.base.util.clean_stale_shared_memory()
    return streaming


def rows_streamed(wish: data_loaders.Wish) -> Iterable[Any]:
    """The table's rows through streaming, from a local directory."""
    streaming, target = _streaming(), wish.folder / _MDS
    if not target.exists():
        with streaming.MDSWriter(out=str(target), columns={"row": f"ndarray:float32:{data_loaders.WIDTH}"}) as writer:
            for index in range(len(wish.dataset)):
                writer.write({"row": _row(index).numpy()})

    class Streamed(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: int) -> Any:
            if wish.seconds:
                time.sleep(wish.seconds)
            return super().__getitem__(at)["row"]

    dataset = Streamed(local=str(target), shuffle=True, shuffle_seed=data_loaders.SEED, batch_size=wish.batch)
    loader: Iterable[Any] = streaming.StreamingDataLoader(
        dataset, batch_size=wish.batch, num_workers=wish.workers, drop_last=True, collate_fn=_stacked
    )
    return loader


def rows_chunked(wish: data_loaders.Wish) -> Iterable[Any]:
    """The table's rows through litdata, from a local directory."""
    import litdata

    target = wish.folder / _CHUNKS
    if not target.exists():
        rows = list(range(len(wish.dataset)))
        litdata.optimize(_row, inputs=rows, output_dir=str(target), chunk_bytes="16MB", num_workers=1)

    class Streamed(litdata.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            if wish.seconds:
                time.sleep(wish.seconds)
            return super().__getitem__(at)

    dataset = Streamed(str(target), shuffle=True, seed=data_loaders.SEED, drop_last=True)
    return _loaded(dataset, wish.batch, wish.workers)


def write_files(paths: list[str], into: Path) -> None:
    """Write files as samples of both, each in a shard of its own."""
    import litdata

    size = max(Path(each).stat().st_size for each in paths)
    with _streaming().MDSWriter(out=str(into / _MDS), columns={"file": "bytes"}, size_limit=size + 4096) as writer:
        for each in paths:
            writer.write({"file": Path(each).read_bytes()})
    litdata.optimize(_bytes, inputs=paths, output_dir=str(into / _CHUNKS), chunk_size=1, num_workers=1)


def files_streamed(remote: Path, cache: Path, batch: int) -> Iterable[Any]:
    """Files from the remote, through streaming; two workers, and otherwise as it comes."""
    streaming = _streaming()
    where = {"remote": str(remote / _MDS), "local": str(cache)}
    dataset = streaming.StreamingDataset(**where, shuffle=True, shuffle_seed=data_loaders.SEED, batch_size=batch)
    loader: Iterable[Any] = streaming.StreamingDataLoader(dataset, batch_size=batch, num_workers=2, collate_fn=_sizes)
    return loader


def files_chunked(remote: Path, cache: Path, batch: int) -> Iterable[Any]:
    """Files from the remote, through litdata; two workers, and otherwise as it comes."""
    import litdata

    where = {"input_dir": f"local:{remote / _CHUNKS}", "cache_dir": str(cache)}
    dataset = litdata.StreamingDataset(**where, shuffle=True, seed=data_loaders.SEED)
    return _loaded(dataset, batch, 2, collate_fn=_sizes)


def _loaded(dataset: Any, batch: int, workers: int, collate_fn: Callable[..., Any] | None = None) -> Iterable[Any]:
    import litdata

    loader: Iterable[Any] = litdata.StreamingDataLoader(
        dataset, batch_size=batch, num_workers=workers, collate_fn=collate_fn
    )
    return loader


def _row(index: int) -> torch.Tensor:
    width = data_loaders.WIDTH
    return torch.arange(index * width, (index + 1) * width, dtype=torch.float32)


def _bytes(path: str) -> bytes:
    return Path(path).read_bytes()


def _sizes(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([len(each["file"] if isinstance(each, dict) else each) for each in samples])


def _stacked(rows: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows))
