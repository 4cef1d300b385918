"""``ftrun`` and ``python -m ftrun``."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    try:
        from ftrun.cli.app import app

        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
