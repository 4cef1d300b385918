"""The second epoch of files that came through the cache, beside local files: samples a second."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import data_loaders as loaders
import data_pictures as pictures
from data_notes import Notes

from ftrun.data.cache.dataset import CachedDataset
from ftrun.data.cache.files import CachedFiles


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--remote", required=True, help="the directory behind the mount")
    parser.add_argument("--local", required=True, help="the same directory, not through the mount")
    parser.add_argument("--cycles", type=int, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--decode", type=float, default=0.001, help="seconds that a sample takes")
    options = parser.parse_args()
    loaders.quieten()
    notes = Notes(options.out)
    names = sorted(each.name for each in Path(options.local).iterdir())
    files = CachedFiles(Path(options.out) / "cache", reserve_free=0)
    made: dict[str, Any] = {}
    for kind, seconds in (("", options.decode), (", read only", 0.0)):
        decode = pictures.Decoded(seconds)
        local = pictures.Plain([f"{options.local}/{name}" for name in names], decode)
        cached = CachedDataset([f"{options.remote}/{name}" for name in names], decode, files)
        made |= {f"local{kind}": local, f"cached{kind}": cached, f"local{kind} again": local}
    built = {
        name: loaders.build("ftrun", loaders.Wish(dataset, options.batch, Path())) for name, dataset in made.items()
    }
    notes.put("first", 0, len(names) / _epoch(built["cached"]))
    for each in built.values():
        _epoch(each)
    order = list(built)
    for cycle in range(options.cycles):
        for name in order[cycle % len(order) :] + order[: cycle % len(order)]:
            notes.put(name, cycle, len(names) / _epoch(built[name]))


def _epoch(loader: Any) -> float:
    began = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
