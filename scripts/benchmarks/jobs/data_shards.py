"""Writes the files of a directory as the peers' shards, one file in each."""

from __future__ import annotations

import argparse
from pathlib import Path

import data_loaders as loaders
import data_streams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--files", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True)
    options = parser.parse_args()
    loaders.quieten()
    paths = [str(each) for each in sorted(options.files.iterdir())]
    data_streams.write_files(paths, options.into)


if __name__ == "__main__":
    main()
