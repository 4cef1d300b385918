"""Which storage a text names, and which driver a URL needs. The only place that imports fsspec."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint.storage.base import UnreachableError
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""Protocols of object stores: a bucket, and keys in it; no directories."""

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(::|://)")


def local_path(where: str) -> Path | None:
    """The directory that a text names; None where it is a URL of something else.

    Raises:
        UsageError: it names nothing, or several things in one.
    """
    if not where:
        raise UsageError("the checkpoint root is empty; set checkpoint.root to a path or a URL")
    if "\0" in where:
        raise UsageError(f"the checkpoint root {where!r} holds a zero byte; set checkpoint.root to a path or a URL")
    match = _URL.match(where)
    if match is None:
        return Path(where).absolute()
    protocol, mark = match.groups()
    if mark == "::" or "::" in where:
        raise UsageError(
            f"checkpoint root {where!r}: only one kind of storage at a time; a cache in front of it would be trusted "
            "with what must be fresh. Set checkpoint.root to what comes after the last '::'"
        )
    if protocol.lower() not in ("file", "local"):
        return None
    path = where[match.end() :]
    if not path.startswith("/"):
        raise UsageError(f"checkpoint root {where!r}: write file:///some/where, or the path alone")
    return Path(path)


def connect(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The driver's filesystem, and the place in it. Most drivers ask nothing of the place; some connect to it.

    Raises:
        UsageError: no driver reads such a URL, it isn't installed, or it doesn't take the options.
        UnreachableError: the driver can't connect.
    """
    import fsspec  # type: ignore[import-untyped]

    protocol, _, place = url.partition("://")
    if protocol in BUCKETS and not place.strip("/"):
        raise UsageError(f"checkpoint root {url!r} names no bucket; set checkpoint.root to {protocol}://bucket/place")
    try:
        # An instance of our own: what we forget of its listings, others may want to keep.
        files, path = fsspec.url_to_fs(url, **options, skip_instance_cache=True)
    except ImportError as error:
        raise UsageError(f"checkpoint root {url!r} needs a driver: {_install(protocol)} ({error})") from error
    except ValueError as error:
        raise UsageError(
            f"checkpoint root {url!r}: {error}. Set checkpoint.root to a path, or to a URL such as s3://bucket/place"
        ) from error
    except TypeError as error:
        raise UsageError(f"checkpoint root {url!r}: its driver doesn't take these options ({error})") from error
    except Exception as error:  # drivers raise what they like
        raise UnreachableError(f"checkpoint root {url!r}: can't connect: {error}") from error
    return files, path.rstrip("/")


def _install(protocol: str) -> str:
    extra = _EXTRAS.get(protocol)
    return f"pip install 'ftrun[{extra}]'" if extra else f"install what fsspec needs for {protocol}://"
