"""Reading remote files: through their path where they have one, through fsspec where they have a URL.

Nothing here has a deadline; :mod:`ftrun.data.cache.patient` puts one around it.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from typing import TYPE_CHECKING, Any

from ftrun.data.cache.records import Listing
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(::|://)")
CHUNK = 8 << 20
_VERSIONS = (
    "ETag",
    "etag",
    "version_id",
    "generation",
    "md5Hash",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "modified",
    "created",
)


class Changed(OSError):
    """A remote file isn't what it was said to be."""


def local_path(url: str | os.PathLike[str]) -> str | None:
    """The absolute path that a URL means on this machine, a mount among them; None where it is a driver's.

    Raises:
        UsageError: it is empty, holds a zero byte, or names a cache of somebody else's.
    """
    if not isinstance(url, str):
        url = os.fspath(url) if isinstance(url, os.PathLike) else ""
    if url.startswith("/") and "\0" not in url:
        return url
    if not url or "\0" in url:
        raise UsageError(f"{url!r} names no file; give a path or a URL")
    found = _URL.match(url)
    if found is None:
        return os.path.abspath(url)
    if found[2] == "::":
        raise UsageError(f"{url!r}: a cache in front of the cache; give what comes after the last '::'")
    if found[1].lower() in ("file", "local"):
        return os.path.abspath(url[found.end() :])
    return None


class Remote:
    """Files somewhere else. Picklable; threads may share it; a forked child connects afresh."""

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        self.storage_options = dict(storage_options or {})
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        return self.storage_options

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.storage_options = state
        self.forget()

    def forget(self) -> None:
        """Forget connections, which a forked child must not share."""
        self._guard = threading.Lock()
        self._connected: dict[str, Any] = {}

    def stat(self, url: str) -> Listing:
        """Size and version of a file.

        Raises:
            OSError: whatever the filesystem or the driver says.
        """
        path = local_path(url)
        if path is not None:
            return _listing(os.stat(path), path)
        files, place = self._connect(url)
        return _told(files.info(place))

    def list(self, directory: str) -> dict[str, Listing]:
        """What a driver says of all files in a directory, by URL; asked in one request where it can do that.

        Raises:
            OSError: whatever the driver says.
        """
        files, place = self._connect(directory)
        files.invalidate_cache(place)
        rows = files.ls(place, detail=True)
        prefix = directory.rstrip("/")
        return {
            f"{prefix}/{row['name'].rstrip('/').rpartition('/')[2]}": _told(row)
            for row in rows
            if row.get("type") == "file"
        }

    def read(self, url: str, size: int) -> bytes:
        """The bytes of a small file, in one request, which can't be torn; more than ``size`` where it has grown.

        Raises:
            OSError: whatever the filesystem or the driver says.
        """
        path = local_path(url)
        if path is not None:
            return _read_small(path, size)
        files, place = self._connect(url)
        data: bytes = files.cat_file(place)
        return data

    def chunks(self, url: str, listing: Listing) -> Iterator[bytes]:
        """A larger file's bytes, in pieces.

        Raises:
            Changed: it isn't the file of that listing any more.
            OSError: whatever the filesystem or the driver says.
        """
        path = local_path(url)
        if path is not None:
            yield from _read_path(path, listing)
        elif listing.size is None:
            yield from self._read_to_the_end(url)
        else:
            yield from self._read_ranges(url, listing, listing.size)

    def _read_to_the_end(self, url: str) -> Iterator[bytes]:
        files, place = self._connect(url)
        with files.open(place, "rb") as file:
            while data := file.read(CHUNK):
                yield data

    def _read_ranges(self, url: str, listing: Listing, size: int) -> Iterator[bytes]:
        files, place = self._connect(url)
        for start in range(0, size, CHUNK):
            data = files.cat_file(place, start=start, end=min(start + CHUNK, size))
            yield data
            if len(data) == size:  # a server that knows no ranges
                return
        if _told(files.info(place)) != listing:
            raise Changed(f"{url} has changed while it was downloaded")

    def _connect(self, url: str) -> tuple[Any, str]:
        place, _, inside = url.partition("::")  # zip://name::s3://bucket/archive.zip: a driver for each archive
        driver = f"{place.partition('://')[0]}::{inside}"
        with self._guard:
            files = self._connected.get(driver)
            if files is None:
                files = self._connected[driver] = self._driver(url)
        return files, files._strip_protocol(place)

    def _driver(self, url: str) -> Any:
        import fsspec  # type: ignore[import-untyped]

        try:
            return fsspec.url_to_fs(url, **self.storage_options, skip_instance_cache=True)[0]
        except ImportError as error:
            raise UsageError(f"{url}: its driver is not installed ({error})") from error
        except ValueError as error:
            raise UsageError(f"{url}: {error}. Give a path, or a URL such as s3://bucket/file") from error
        except TypeError as error:
            raise UsageError(f"{url}: its driver doesn't take these storage options ({error})") from error


def _read_small(path: str, size: int) -> bytes:
    """A file in one request where it is what it was: to ask for a byte more tells its end, too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, size + 1)
        while 0 < len(data) < size:  # an interrupted request, or the file has shrunk
            more = os.read(descriptor, size + 1 - len(data))
            if not more:
                break
            data += more
        return data
    finally:
        os.close(descriptor)


def _read_path(path: str, listing: Listing) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        while data := file.read(CHUNK):
            yield data
        if listing.size is not None and _listing(os.fstat(file.fileno()), path) != listing:
            raise Changed(f"{path} has changed while it was copied")


def _listing(found: os.stat_result, path: str) -> Listing:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(f"{path} is a directory; give the files in it")
    if not stat.S_ISREG(found.st_mode):
        raise PermissionError(f"{path} is no regular file")
    return Listing(found.st_size, str(found.st_mtime_ns))


def _told(info: Mapping[str, Any]) -> Listing:
    if info.get("type") == "directory":
        raise IsADirectoryError(f"{info.get('name')} is a directory; give the files in it")
    size = info.get("size")
    version = next((str(info[name]) for name in _VERSIONS if info.get(name) is not None), "")
    return Listing(int(size) if size is not None else None, version)
