"""Trains for two epochs on files of a remote, on every rank of a job; the remote counts what it sends."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import data_loaders as loaders
import data_pictures as pictures
from data_notes import Notes

import ftrun
from ftrun.data.cache.dataset import CachedDataset
from ftrun.data.cache.files import CachedFiles


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--urls", type=Path, required=True, help="a file of them, one a line")
    parser.add_argument("--options", type=json.loads, default={}, help="of their driver, as JSON")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    loaders.quieten()
    notes = Notes(options.out)
    urls = options.urls.read_text().splitlines()
    with ftrun.Session.open(process_group=False, every=None) as ft:
        dataset: Any = CachedDataset(urls, pictures.Decoded(0.0), CachedFiles(storage_options=options.options))
        loader = ft.loader(dataset, global_batch=8, shuffle=True, seed=loaders.SEED, num_workers=options.workers)
        samples = 0
        for batch in ft.steps(loader, total=options.epochs * len(loader)):
            samples += len(batch)
    notes.put("samples", 0, samples)


if __name__ == "__main__":
    main()
