"""A dataset's URLs on disk: written once for each list, mapped by whoever reads them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ftrun import durable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_MAGIC = b"FTURLS01"
_HEAD = 16


class Strings(Protocol):
    """A list of strings, of which as little as possible is asked."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, index: int, /) -> str:
        """One of them."""
        ...


def files_of(dataset: Any) -> tuple[Any, Strings] | None:
    """The cache and the URLs, by index, of a dataset of cached files, seen through ``Subset``; None for others."""
    files, urls = getattr(dataset, "files", None), getattr(dataset, "urls", None)
    if hasattr(files, "spec") and hasattr(files, "fetch") and urls is not None and hasattr(urls, "__getitem__"):
        return files, urls
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is None or indices is None or type(dataset).__name__ != "Subset":
        return None
    found = files_of(inner)
    return None if found is None else (found[0], Chosen(found[1], np.asarray(indices, dtype=np.int64)))


class Chosen:
    """Some of a list's strings, in another order; nothing is copied."""

    def __init__(self, strings: Strings, indices: NDArray[np.int64]) -> None:
        self._strings, self._indices = strings, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int, /) -> str:
        return self._strings[int(self._indices[index])]


def pack(urls: Strings) -> tuple[str, bytes]:
    """A list's digest and its file's content."""
    data, lengths = bytearray(), np.empty(len(urls), dtype=np.int64)
    for number in range(len(urls)):
        encoded = str(urls[number]).encode("utf-8", "surrogateescape")
        data += encoded
        lengths[number] = len(encoded)
    content = b"".join([_MAGIC, len(urls).to_bytes(8, "little"), np.cumsum(lengths).astype("<i8").tobytes(), data])
    return hashlib.blake2b(content, digest_size=16).hexdigest(), content


def store(path: Path, content: bytes) -> None:
    """Write a list that isn't there yet.

    Raises:
        OSError: the disk doesn't take it.
    """
    if not path.is_file() or path.stat().st_size != len(content):
        durable.write(path, content)


class MappedUrls:
    """A list on disk. Holds nothing in memory but what is read.

    Raises:
        OSError: there is none.
        ValueError: it is damaged.
    """

    def __init__(self, path: Path) -> None:
        data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        if len(data) < _HEAD or data[:8].tobytes() != _MAGIC:
            raise ValueError(f"{path} holds no list of URLs")
        count = int.from_bytes(data[8:_HEAD].tobytes(), "little")
        after = _HEAD + 8 * count
        if len(data) < after:
            raise ValueError(f"{path} is torn")
        self._ends = data[_HEAD:after].view("<i8")
        self._data = data[after:]
        if len(self._data) != (int(self._ends[-1]) if count else 0):
            raise ValueError(f"{path} is torn")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int, /) -> str:
        start = int(self._ends[index - 1]) if index else 0
        return self._data[start : int(self._ends[index])].tobytes().decode("utf-8", "surrogateescape")


class UrlIndex:
    """Which indices a URL has, for a million URLs in 16 MB.

    Args:
        urls: by index.
    """

    def __init__(self, urls: Strings) -> None:
        marks = np.fromiter((_mark(urls[number]) for number in range(len(urls))), dtype=np.uint64, count=len(urls))
        self._indices = np.argsort(marks, kind="stable")
        self._marks = marks[self._indices]

    def find(self, urls: Sequence[str]) -> NDArray[np.int64]:
        """One index of each URL, -1 for those that aren't in the list."""
        wanted = np.fromiter(map(_mark, urls), dtype=np.uint64, count=len(urls))
        at = np.minimum(np.searchsorted(self._marks, wanted), len(self._marks) - 1)
        return np.where(self._marks[at] == wanted, self._indices[at], -1).astype(np.int64)


def _mark(url: str) -> int:
    return int.from_bytes(hashlib.blake2b(url.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")
