"""What nodes of a net are reached by."""

from __future__ import annotations


def mac(number: int) -> str:
    """The address of a node's network card."""
    return f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"


def addresses(number: int) -> tuple[str, str]:
    """A node's addresses, IPv4 and IPv6."""
    return f"10.77.{number >> 8}.{number & 255}", f"fd00:77::{number:x}"
