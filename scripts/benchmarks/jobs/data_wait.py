"""Trains on files of a remote for some steps, with several loaders in turns: the share of the time that it waits."""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import data_loaders as loaders
import data_pictures as pictures
from data_notes import Notes

if TYPE_CHECKING:
    from collections.abc import Iterable

_TORCH = {"torch, 0 workers": (0, None), "torch, 2 workers": (2, None), "torch, 6 workers, prefetch 4": (6, 4)}
_STREAMS = {"streaming": "files_streamed", "litdata": "files_chunked"}
_OURS = {"ftrun": 0, "ftrun, 2 workers": 2}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--remote", required=True)
    parser.add_argument("--methods", nargs="+", required=True, help="NAME=CYCLES")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--compute", type=float, default=0.04, help="seconds of a step")
    options = parser.parse_args()
    loaders.quieten()
    notes = Notes(options.out)
    wanted = {name: int(count) for name, _, count in (each.rpartition("=") for each in options.methods)}
    for cycle in range(max(wanted.values())):
        for number, name in enumerate(name for name, count in list(wanted.items()) if cycle < count):
            # Removed by whoever gave the directory: ext4 without a journal looks at each inode that was freed lately
            # before it takes another, which whoever makes files next would pay for.
            cache = Path(options.out) / f"cache-{cycle}-{number}"
            try:
                notes.put(name, cycle, _waited(_loader(name, options, cache), options))
            except Exception:  # a peer that falls is left out
                traceback.print_exc()
                wanted[name] = 0


def _loader(name: str, options: argparse.Namespace, cache: Path) -> Iterable[Any]:
    name = name.removesuffix(" again")
    remote = Path(options.remote)
    if name in _STREAMS:
        import data_streams

        return getattr(data_streams, _STREAMS[name])(remote, cache, options.batch)
    paths = [str(remote / "files" / each) for each in sorted((remote / "files").iterdir())]
    decode = pictures.Decoded(0.0)
    if name in _TORCH:
        workers, prefetch = _TORCH[name]
        wish = loaders.Wish(pictures.Plain(paths, decode), options.batch, cache, workers=workers, prefetch=prefetch)
        return loaders.build("torch", wish)
    from ftrun.data.cache.dataset import CachedDataset
    from ftrun.data.cache.files import CachedFiles

    dataset = CachedDataset(paths, decode, CachedFiles(cache, reserve_free=0))
    return loaders.build("ftrun", loaders.Wish(dataset, options.batch, cache, workers=_OURS[name]))


def _waited(loader: Iterable[Any], options: argparse.Namespace) -> float:
    """Of a whole run of so many steps, its first batch included; a loader's construction and end are not."""
    waited = computed = 0.0
    at = time.perf_counter()
    batches = iter(loader)
    for _ in range(options.steps):
        next(batches)
        got = time.perf_counter()
        time.sleep(options.compute)
        waited, computed, at = waited + got - at, computed + time.perf_counter() - got, time.perf_counter()
    return waited / (waited + computed)


if __name__ == "__main__":
    main()
