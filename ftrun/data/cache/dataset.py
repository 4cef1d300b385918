"""``CachedDataset``: a map-style dataset of files that are somewhere else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from ftrun.data.cache.files import CachedFiles
from ftrun.data.cache.packed import PackedStrings
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_LEASES = 16
"""Files of a batch that are held at a time: each takes a descriptor."""


class CachedDataset(Dataset[Any]):
    """One sample per file, read through the node's cache.

    ``CachedDataset(urls, decode)[i]`` is ``decode(path)``, with a local path of ``urls[i]`` that is valid while
    ``decode`` runs: what it returns must not read the file later, unless it keeps it open or mapped.

    A million URLs take the bytes of their text and eight bytes each, shared by all forked workers.

    Attributes:
        urls: the URLs, packed.
        files: the cache.
        decode: makes a sample of a local path.
        labels: one for each URL, or None.
    """

    def __init__(
        self,
        urls: Iterable[str],
        decode: Callable[[Path], Any],
        files: CachedFiles | None = None,
        *,
        labels: Sequence[Any] | None = None,
    ) -> None:
        """Take a list of files; nothing is read yet.

        Args:
            urls: URLs that fsspec reads, or paths; taken once, in their order.
            decode: called in the worker that needs the sample.
            files: the cache to use; the job's own one where it's left out.
            labels: samples are then ``(decode(path), labels[i])``. An array or tensor is better than a long list.

        Raises:
            UsageError: there are as many labels as files only in the user's mind, ``decode`` can't be called, or
                ``urls`` is one string.
        """
        if isinstance(urls, str | bytes) or not isinstance(urls, Iterable):
            raise UsageError(f"CachedDataset(urls=...) takes a list of URLs, not {urls!r}")
        if not callable(decode):
            raise UsageError(f"CachedDataset(decode=...) takes a function of a path, not {decode!r}")
        try:
            self.urls = urls if isinstance(urls, PackedStrings) else PackedStrings(map(_text, urls))
        except TypeError as error:
            raise UsageError(f"CachedDataset(urls=...): {error}") from error
        if labels is not None and len(labels) != len(self.urls):
            raise UsageError(f"CachedDataset has {len(self.urls)} URLs and {len(labels)} labels; give one for each")
        self.files = files if files is not None else CachedFiles()
        self.decode = decode
        self.labels = labels
        self._digest = ""

    @property
    def fingerprint(self) -> str:
        """What a checkpoint remembers of the dataset: number, names and order of the files."""
        if not self._digest:
            self._digest = f"files-{len(self.urls)}-{self.urls.digest()[:24]}"
        return self._digest

    def __len__(self) -> int:
        return len(self.urls)

    def __getitem__(self, index: int) -> Any:
        with self.files.get(self.urls[index]) as path:
            return self._sample(index, path)

    def _sample(self, index: int, path: Path) -> Any:
        try:
            sample = self.decode(path)
        except Exception as error:  # whatever decoding raises: it goes on its way with a note
            error.add_note(f"sample {index} of the dataset: {self.urls[index]}")
            raise
        return sample if self.labels is None else (sample, self.labels[index])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """A batch: what is missing of it is fetched side by side."""
        samples: list[Any] = []
        asked = False
        for first in range(0, len(indices), _LEASES):
            # Some at a time: what finds a file is in the processor's caches then, from which decode drives it.
            some = indices[first : first + _LEASES]
            leases = self.files.peek([self.urls[index] for index in some])
            try:
                for index, lease in zip(some, leases, strict=True):
                    if lease is not None:
                        samples.append(self._sample(index, lease.path))
                        continue
                    if not asked:
                        asked = True
                        self._ask_for(indices[len(samples) + 1 :])
                    samples.append(self[index])
            finally:
                for lease in leases:
                    if lease is not None:
                        lease.release()
        return samples

    def _ask_for(self, indices: list[int]) -> None:
        urls = [self.urls[index] for index in indices]
        self.files.prefetch([url for url in urls if not self.files.has(url)])


def _text(url: Any) -> Any:
    """A path object counts as its text."""
    return str(url) if isinstance(url, Path) else url
