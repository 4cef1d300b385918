"""Python's collections of garbage, kept from looking through ten thousand new objects that all stay."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Collect no garbage for the length of a block.

    What is made in it, objects by the ten thousand, all stays or is gone at its end; looking through them, and through
    all that the script has made, again and again for cycles would take longer than all else.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
