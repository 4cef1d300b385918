"""Names of objects and pointers, and what a pointer says. Pure.

A pointer is a symbolic link's target of at most 59 characters, which ext4 and XFS keep in the inode: a million files
cost no block of their own, and one readlink tells all that a warm open wants to know.
"""

from __future__ import annotations

import binascii
import hashlib
import math
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ftrun.data.cache.records import Listing

_BYTES = 20
_SUFFIX = re.compile(r"(?:\.[A-Za-z0-9]{1,10}){1,2}$")
_TICKS = 65536
_NUMBERS = 10
"""Bytes of a pointer after the key: six of time, four of checksum."""


def slot_of(url: str) -> str:
    """Name of a URL's pointer: 40 hex digits."""
    return hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()[: 2 * _BYTES]


def key_of(url: str, listing: Listing) -> str:
    """Name of the object that holds this version of a file: 40 hex digits."""
    size = "?" if listing.size is None else str(listing.size)
    text = "\0".join((url, size, listing.version))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[: 2 * _BYTES]


def suffix_of(url: str) -> str:
    """What the file's name ends with, for readers that look at it: ``.jpg``, ``.tar.gz``; empty where it's odd."""
    found = _SUFFIX.search(url.rpartition("/")[2].partition("?")[0])
    return found[0] if found and found.start() else ""


class Pointer(NamedTuple):
    """What is known of a URL.

    Attributes:
        key: of the object that holds it.
        size: bytes of the object.
        crc: its CRC32C, as it was downloaded.
        checked: when the remote was last asked, in seconds since 1970, to some 15 microseconds.
    """

    key: str
    size: int
    crc: int
    checked: float

    def encode(self) -> str:
        """As a link's target."""
        ticks = math.ceil(self.checked * _TICKS)  # six bytes last until 2106
        packed = bytes.fromhex(self.key) + ticks.to_bytes(6, "big") + self.crc.to_bytes(4, "big")
        return binascii.b2a_base64(packed, newline=False).decode().replace("/", "_") + f"{self.size:x}"

    @staticmethod
    def decode(text: str) -> Pointer | None:
        """Back from a link's target; None where it is no pointer."""
        width = (_BYTES + _NUMBERS) // 3 * 4
        try:
            packed = binascii.a2b_base64(text[:width].replace("_", "/"))
            size = int(text[width:], 16)
        except ValueError:
            return None
        if len(packed) != _BYTES + _NUMBERS or size < 0:
            return None
        checked = int.from_bytes(packed[_BYTES : _BYTES + 6], "big") / _TICKS
        crc = int.from_bytes(packed[_BYTES + 6 :], "big")
        return Pointer(packed[:_BYTES].hex(), size, crc, checked)
