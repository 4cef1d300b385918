"""Where the samples of a tar file are: a small file beside it, ``NAME.tar.index``.

Its first line says how many samples the tar file has and how long it is, the second where each of them begins::

    {"v": 1, "samples": 2, "size": 10240}
    [0, 1536]

Make them once, when the files are written::

    python -m ftrun.data.iterable.tar_index data/*.tar
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VERSION = 1
SUFFIX = ".index"

MAKE = "python -m ftrun.data.iterable.tar_index"


@dataclass(frozen=True)
class TarIndex:
    """Where the samples of one tar file begin.

    Attributes:
        size: bytes of the tar file.
        offsets: of the first member of each sample.
    """

    size: int
    offsets: list[int]


def key_of(name: str) -> tuple[str, str] | None:
    """A member's sample and its part of it: ``a/b.left.jpg`` is ``left.jpg`` of ``a/b``; None for no part of any."""
    directory, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    return (directory + slash + stem, extension.lower()) if stem and dot else None


def members(archive: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Key, part and header of each file in an archive that belongs to a sample, from where it is.

    Raises:
        tarfile.ReadError: it is cut off or damaged. Python's own reader takes that for the end.
    """
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]  # it would remember each of them
        found = key_of(member.name) if member.isfile() else None
        if found is not None:
            yield *found, member
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    block = archive.fileobj.read(tarfile.BLOCKSIZE)
    if block != tarfile.NUL * tarfile.BLOCKSIZE:
        what = "is cut off, as the mark of the end is missing" if len(block) < tarfile.BLOCKSIZE else "is damaged"
        raise tarfile.ReadError(f"the tar file {what}, at byte {archive.offset}")


def offsets(path: Path) -> list[int]:
    """Where each sample of a tar file that isn't compressed begins: reads its headers only."""
    found, last = [], None
    with tarfile.open(path, "r:") as archive:
        for key, _, member in members(archive):
            if key != last:
                found.append(member.offset)
                last = key
    return found


def write(path: Path) -> TarIndex:
    """Make the index of a tar file.

    Raises:
        UsageError: it isn't one, or is compressed.
        OSError: it can't be read, or the index not be written.
    """
    try:
        index = TarIndex(path.stat().st_size, offsets(path))
    except tarfile.ReadError as error:
        raise UsageError(
            f"{path} can't be indexed ({error}): it is damaged, no tar file, or compressed. In a compressed one "
            "nothing can be found without reading all before: store it plain, and compress what is inside"
        ) from error
    target = path.with_name(path.name + SUFFIX)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    head = {"v": VERSION, "samples": len(index.offsets), "size": index.size}
    with temporary.open("w") as file:
        file.write(json.dumps(head) + "\n" + json.dumps(index.offsets) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)
    return index


def samples(path: Path) -> int:
    """How many samples an index names; reads its first line.

    Raises:
        FileNotFoundError: there is none.
        UsageError: it is no index of this version.
    """
    with path.open() as file:
        return int(_head(path, file.readline())["samples"])


def read(path: Path, size: int) -> TarIndex:
    """Read the index of a tar file.

    Args:
        path: of the index.
        size: of the tar file in bytes.

    Raises:
        FileNotFoundError: there is none.
        UsageError: it is no index of this version, or that of another file.
    """
    with path.open() as file:
        head = _head(path, file.readline())
        if head["size"] != size:
            raise UsageError(
                f"{path} is the index of a tar file of {head['size']} bytes, and the one beside it has {size}: it was "
                f"written again since. Make the index anew: {MAKE} {str(path).removesuffix(SUFFIX)}"
            )
        try:
            found = [int(each) for each in json.loads(file.readline())]
        except (TypeError, ValueError) as error:
            raise _damaged(path, str(error)) from error
    if len(found) != head["samples"]:
        raise _damaged(path, f"{len(found)} places for {head['samples']} samples")
    return TarIndex(size, found)


def _head(path: Path, line: str) -> dict[str, Any]:
    try:
        head: dict[str, Any] = json.loads(line)
        sound = head["v"] == VERSION and all(type(head[name]) is int for name in ("samples", "size"))
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, repr(error)) from error
    if not sound:
        raise _damaged(path, f"its head is {head}")
    return head


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is no index of a tar file ({why}): make it anew with {MAKE}, or remove it")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the index of each tar file named on the command line."""
    parser = argparse.ArgumentParser(prog=MAKE, description="Writes NAME.tar.index beside each NAME.tar.")
    parser.add_argument("tar", type=Path, nargs="+")
    total = 0
    for path in parser.parse_args(arguments).tar:
        try:
            total += len(write(path).offsets)
        except (UsageError, OSError) as error:
            print(f"ftrun: {error}", file=sys.stderr)
            return 2
    print(f"{total:,} samples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
