"""JSON objects that carry their own checksum as their last line, so that a reader needs no other witness.

``{"a":1,"b":2,⏎"crc":"0a1b2c3d"}⏎`` is one valid JSON document. The checksum is the CRC32C of the document
without the checksum: ``{"a":1,"b":2}``.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from crc32c import crc32c

from ftrun.checkpoint.checksums import from_hex, to_hex


class UnsealedError(ValueError):
    """The bytes are not a whole sealed document; the text is the reason, fit to follow the file's name."""


def canonical(document: object, *, sort: bool = True) -> bytes:
    """The one JSON text of a document: no spaces, ASCII, keys sorted unless their order carries meaning.

    Raises:
        ValueError: an infinite float or NaN.
        TypeError: a value that JSON has no word for.
    """
    text = json.dumps(document, sort_keys=sort, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def seal(document: dict[str, Any], key: str = "crc", *, sort: bool = True) -> bytes:
    """The document with its checksum under ``key``. It needs at least one other key."""
    return seal_body(canonical(document, sort=sort), key)


def seal_body(body: bytes, key: str = "crc") -> bytes:
    """:func:`seal` for a document that is JSON by now, as :func:`canonical` makes it."""
    return body[:-1] + f',\n"{key}":"{to_hex(crc32c(body))}"}}\n'.encode("ascii")


def unseal(data: bytes, key: str = "crc") -> dict[str, Any]:
    """The document without its checksum.

    Raises:
        UnsealedError: empty, torn, changed, or no proper JSON object.
    """
    if not data.strip(b"\0"):
        raise UnsealedError("is empty" if not data else f"holds nothing but {len(data)} zero bytes")
    tail = re.search(rb',\n"' + re.escape(key.encode()) + rb'":"([0-9a-f]{8})"\}\n\Z', data)
    if tail is None:
        raise UnsealedError(f"is torn: its last line is no {key}")
    body = data[: tail.start()] + b"}"
    if crc32c(body) != from_hex(tail[1].decode("ascii")):
        raise UnsealedError(f"differs from its own checksum ({key})")
    return _parse(body)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body, object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnsealedError:
        raise
    except (ValueError, RecursionError) as error:
        raise UnsealedError(f"is no valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise UnsealedError("is no JSON object")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        names = [name for name, _ in pairs]
        raise UnsealedError(f"has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return document


def _no_constant(name: str) -> NoReturn:
    raise UnsealedError(f"holds {name}, which is no JSON")
