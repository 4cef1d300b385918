"""Files that stand for pictures: made, and read by the datasets that are measured."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

if TYPE_CHECKING:
    from pathlib import Path


def make(folder: Path, count: int, size: int) -> list[str]:
    """Write files of random bytes, the same each time.

    Returns:
        Their names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(f"pictures/{count}/{size}")
    names = [f"{number:05d}.bin" for number in range(count)]
    for name in names:
        (folder / name).write_bytes(dice.randbytes(size))
    return names


class Decoded:
    """Reads a file, and takes a while over it.

    Args:
        seconds: asleep, as a busy core would measure the machine.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, path: Path | str) -> int:
        with open(path, "rb") as file:
            size = len(file.read())
        if self._seconds:
            time.sleep(self._seconds)
        return size


class Plain(Dataset[Any]):
    """Files that are read where they are."""

    def __init__(self, paths: list[str], decode: Decoded) -> None:
        self._paths, self._decode = paths, decode

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        return self._decode(self._paths[index])
