"""Where tests with nodes are left out: where there can be no net, and never in CI."""

from __future__ import annotations

import os

import pytest

from namespaces.net import why_not


def must_run() -> bool:
    """Whether this is CI, where a test that can't run has failed."""
    return os.environ.get("CI") == "true" and os.geteuid() == 0


NET = pytest.mark.skipif(not must_run() and bool(why_not()), reason=why_not() or "-")
"""The mark of tests that need a net."""
