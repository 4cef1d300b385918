"""Saves of torch's distributed checkpoint, as its users make them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

import ftrun.dcp
from power_loss.perform import mark

if TYPE_CHECKING:
    from pathlib import Path


def state_of(step: int) -> dict[str, Any]:
    return {"a": torch.full((40,), float(step)), "b": torch.full((50,), float(step)), "step": step}


def save(directory: Path, step: int, *, single_file: bool) -> None:
    writer = dcp.FileSystemWriter(directory / "root", single_file_per_rank=single_file, sync_files=True, overwrite=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an old checkpoint is overwritten, and that there is one process only
        dcp.save(state_of(step), storage_writer=writer, no_dist=True)


def load(reader: dcp.StorageReader) -> dict[str, Any]:
    state = state_of(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def first(directory: Path) -> None:
    """One save into a new directory."""
    mark(directory, "start")
    save(directory, 1, single_file=True)
    mark(directory, "returned")


def again_in_one_file(directory: Path) -> None:
    _again(directory, single_file=True)


def again_in_several_files(directory: Path) -> None:
    _again(directory, single_file=False)


def _again(directory: Path, *, single_file: bool) -> None:
    """A second save into the directory of the first."""
    save(directory, 1, single_file=single_file)
    mark(directory, "start")
    save(directory, 2, single_file=single_file)
    mark(directory, "returned")


def again_with_ftrun(directory: Path) -> None:
    """The same with the storage of ftrun.dcp."""
    writer = ftrun.dcp.Writer(directory / "root")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state_of(1), storage_writer=writer, no_dist=True)
        mark(directory, "start")
        dcp.save(state_of(2), storage_writer=writer, no_dist=True)
    mark(directory, "returned")
