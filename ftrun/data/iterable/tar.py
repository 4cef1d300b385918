"""Samples in tar files, grouped by name as WebDataset has them: an exact position, and a seek that reads headers only.

For example, over files with members ``0001.jpg``, ``0001.cls``, ``0002.jpg`` and so on::

    dataset = TarShards(sorted(Path("data").glob("*.tar")), decode=lambda sample: (image(sample["jpg"]), ...))
    loader = ftrun.DataLoader(dataset, global_batch=256, shuffle=True)

Each file is a shard. Where all have an index (:mod:`ftrun.data.iterable.tar_index`), epochs have each sample once and a
resume begins at the right byte. Nothing is unpickled, whatever a member's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ftrun.data.iterable import tar_index
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ftrun.data.cache.files import CachedFiles

    Sample = dict[str, Any]

_KEPT = 64  # indexes; one of 10,000 samples takes about 400 kB


class TarShards:
    """A dataset in tar files, for :class:`ftrun.DataLoader`.

    A sample is a dict of bytes by the part of the name after the first dot, lower-case, with ``__key__``, the part
    before. Members of one sample follow one another in the file.

    Args:
        tars: paths, or URLs where ``cache`` is given. The order counts: a resume needs the same list.
        decode: makes of such a dict what the loader collates. Runs in the workers, so give a function of a module.
        cache: fetches URLs, and slow mounts, once per node.

    Attributes:
        num_shards: number of files.

    Raises:
        UsageError: no files, or URLs without a cache.
    """

    def __init__(
        self,
        tars: Sequence[str | Path],
        *,
        decode: Callable[[Sample], Any] | None = None,
        cache: CachedFiles | None = None,
    ) -> None:
        if isinstance(tars, str | Path):
            raise UsageError(f"TarShards({str(tars)!r}): give a list of tar files; sorted(Path(...).glob('*.tar'))")
        self._tars = [str(each) for each in tars]
        if not self._tars:
            raise UsageError("TarShards([]): no tar files; check the pattern by which they are listed")
        remote = [each for each in self._tars if "://" in each]
        if remote and cache is None:
            raise UsageError(f"{remote[0]} is no local file: give TarShards(..., cache=ftrun.CachedFiles())")
        self._decode, self._files = decode, _Files(cache)
        self.num_shards = len(self._tars)

    @property
    def files(self) -> CachedFiles | None:
        """The cache; None where files are read in place."""
        return self._files.cache

    def shard_urls(self, count: int) -> list[list[str]]:
        """The files of each shard, in the order in which they are read."""
        return [self._tars[index::count] for index in range(count)]

    @property
    def fingerprint(self) -> str:
        """A digest of the names."""
        return hashlib.blake2b("\n".join(self._tars).encode(), digest_size=8).hexdigest()

    def shard(self, index: int, count: int) -> Tars:
        """Every ``count``-th file from the ``index``-th on.

        Raises:
            UsageError: there are not as many files.
        """
        if not 0 <= index < count <= len(self._tars):
            raise UsageError(
                f"{len(self._tars)} tar files can't be {count} shards: use virtual_shards={self.num_shards}"
            )
        return Tars(self._tars[index::count], self._decode, self._files)

    def shard_lengths(self, count: int) -> list[int] | None:
        """Samples in each shard; None where a file has no index."""
        try:
            samples = [self._samples(each) for each in self._tars]
        except FileNotFoundError:
            return None
        return [sum(samples[index::count]) for index in range(count)]

    def _samples(self, tar: str) -> int:
        with self._files.local(tar + tar_index.SUFFIX) as path:
            return tar_index.samples(path)


class Tars:
    """Some tar files, one after another, from any sample on."""

    def __init__(self, tars: list[str], decode: Callable[[Sample], Any] | None, files: _Files) -> None:
        self._tars, self._decode, self._files = tars, decode, files
        self._start = 0

    def seek(self, number: int) -> None:
        """Begin at a sample."""
        self._start = number

    def __iter__(self) -> Iterator[Any]:
        """The samples, decoded."""
        left = self._start
        for place, tar in enumerate(self._tars):
            self._files.expect(self._tars[place + 1 : place + 2])
            with self._files.local(tar) as path:
                index = self._files.index(tar, path) if left and tar.endswith(".tar") else None
                if index is not None and left >= len(index.offsets):
                    left -= len(index.offsets)
                    continue
                yield from self._read(tar, path, index.offsets[left] if index else 0, 0 if index else left)
            left = 0

    def _read(self, tar: str, path: Path, offset: int, drop: int) -> Iterator[Any]:
        with path.open("rb") as file:
            file.seek(offset)
            try:
                for number, sample in enumerate(_grouped(file)):
                    if number >= drop:
                        yield sample if self._decode is None else self._decode(sample)
            except tarfile.TarError as error:
                error.add_note(f"ftrun was reading {tar}")
                raise


def _grouped(file: IO[bytes]) -> Iterator[Sample]:
    sample: Sample = {}
    with _archive(file) as archive:
        for key, part, member in tar_index.members(archive):
            if sample and key != sample["__key__"]:
                yield sample
                sample = {}
            if part in sample:
                raise tarfile.TarError(f"two members {member.name!r} in one sample")
            content = archive.extractfile(member)
            assert content is not None  # it is a file
            sample["__key__"] = key
            sample[part] = content.read()
    if sample:
        yield sample


def _archive(file: IO[bytes]) -> tarfile.TarFile:
    # Plain ones begin anywhere; compressed ones are tried only from the start.
    return tarfile.open(fileobj=file, mode="r:*" if file.tell() == 0 else "r:")


class _Files:
    """Files and their indexes, here or fetched; the indexes used last are kept."""

    def __init__(self, cache: CachedFiles | None) -> None:
        self.cache = cache
        self._indexes: OrderedDict[str, tar_index.TarIndex] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"cache": self.cache, "_indexes": OrderedDict()}

    @contextlib.contextmanager
    def local(self, name: str) -> Iterator[Path]:
        if self.cache is None:
            yield Path(name)
        else:
            with self.cache.open(name) as path:
                yield path

    def expect(self, names: list[str]) -> None:
        if self.cache is not None:
            self.cache.prefetch(names)

    def index(self, tar: str, path: Path) -> tar_index.TarIndex:
        size = path.stat().st_size
        found = self._indexes.pop(tar, None)
        if found is None or found.size != size:
            found = self._read(tar, path, size)
        self._indexes[tar] = found
        if len(self._indexes) > _KEPT:
            self._indexes.popitem(last=False)
        return found

    def _read(self, tar: str, path: Path, size: int) -> tar_index.TarIndex:
        with contextlib.suppress(FileNotFoundError), self.local(tar + tar_index.SUFFIX) as index:
            return tar_index.read(index, size)
        return tar_index.TarIndex(size, tar_index.offsets(path))
