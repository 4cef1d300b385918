"""Epochs of several loaders over the same samples, in turns: samples a second."""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path
from typing import Any

import data_loaders as loaders
from data_notes import Notes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0.0, help="that a sample takes")
    parser.add_argument("--cycles", type=int, required=True)
    options = parser.parse_args()
    loaders.quieten()
    notes = Notes(options.out)
    built = {}
    for method in options.methods:
        try:
            built[method] = _loader(method, options)
            _epoch(built[method])
        except Exception:  # a peer that falls is left out, and its last word is its figure
            traceback.print_exc()
            built.pop(method, None)
    names = list(built)
    for cycle in range(options.cycles):
        # In another order each time, so that nobody always comes after the same one.
        for method in names[cycle % len(names) :] + names[: cycle % len(names)]:
            notes.put(method, cycle, options.samples / _epoch(built[method]))


def _loader(method: str, options: argparse.Namespace) -> Any:
    table: Any = loaders.table(options.samples)
    dataset = loaders.Slow(table, options.seconds) if options.seconds else loaders.Rows(table)
    return loaders.build(method, loaders.Wish(dataset, options.batch, Path(options.out), options.seconds))


def _epoch(loader: Any) -> float:
    began = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
