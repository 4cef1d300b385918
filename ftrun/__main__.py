"""``ftrun`` and ``python -m ftrun``."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
    _open_standard_streams()
    try:
        from ftrun.cli.app import app

        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _open_standard_streams() -> None:
    """Give closed standard streams (``ftrun ... >&-``) a place to go, before a file of ours gets their number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.dup2(descriptor, number)
            if descriptor > 2:
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, mode))


if __name__ == "__main__":
    main()
