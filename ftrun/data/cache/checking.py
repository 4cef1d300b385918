"""Asking remotes in batches whether files are still what they were."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ftrun.data.cache.obtaining import Obtaining
from ftrun.data.cache.refusals import RemoteError
from ftrun.data.cache.remote import local_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ftrun.data.cache.node import Node
    from ftrun.data.cache.records import Listing

_WORTH_LISTING = 8
_THREADS = 16


def revalidate(node: Node, urls: Sequence[str], since: float) -> int:
    """Ask for those that are here from before ``since``, and write down which of them are still the same.

    Returns:
        How many have changed or vanished. What couldn't be asked is left for its next use.
    """
    due = [url for url in dict.fromkeys(urls) if (known := node.filling.pointer(url)) and known.checked < since]
    groups = _by_directory(due)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ftrun-check") as pool:
        return sum(pool.map(lambda group: _check(node, group, since), groups))


def _by_directory(urls: Iterable[str]) -> list[list[str]]:
    """Many files of a driver's directory together, all others alone: a mount has no request for many."""
    directories: dict[str, list[str]] = defaultdict(list)
    alone: list[list[str]] = []
    for url in urls:
        if local_path(url) is None and "::" not in url:
            directories[url.rpartition("/")[0]].append(url)
        else:
            alone.append([url])
    for group in directories.values():
        alone.extend([group] if len(group) >= _WORTH_LISTING else [[url] for url in group])
    return alone


def _check(node: Node, group: list[str], since: float) -> int:
    asked = time.time()
    try:
        listings = _listings(node, group)
    except RemoteError:
        return 0
    changed = 0
    obtaining = Obtaining(node, since, 1)
    for url in group:
        known, listing = node.filling.pointer(url), listings.get(url)
        if known is None:
            continue
        if listing is not None and obtaining.is_same(url, known, listing):
            obtaining.confirm(url, known, asked)
        else:
            changed += 1
    return changed


def _listings(node: Node, group: list[str]) -> dict[str, Listing]:
    copying = node.copying
    if len(group) == 1:
        try:
            return {group[0]: copying.look(group[0])}
        except FileNotFoundError:
            return {}
    directory = group[0].rpartition("/")[0]
    return copying.list(directory)
