"""``ftrun cache``: what lies in this node's cache of data files, whether it is whole, and throwing it away."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftrun.cli.ckpt_place import told
from ftrun.config.units import format_size
from ftrun.contract import ExitCode
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.data.cache.layout import Layout
    from ftrun.data.cache.records import CachedObject

_Root = Annotated[str, typer.Option("--root", help="Directory of the cache; $FTRUN_CACHE or the default one.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]


def ls(
    root: _Root = "",
    everything: Annotated[bool, typer.Option("--all", help="Every object, not only the latest twenty.")] = False,
    as_json: _Json = False,
) -> None:
    """Say what lies in the cache, the latest used first, and how often it has helped."""
    from ftrun.data.cache import eviction
    from ftrun.data.cache.pages import node_counters

    with told():
        layout = _layout(root)
        there = [each for shard in eviction.shards(layout) for each in eviction.objects(layout, shard)]
        counters = node_counters(layout.pages)
    there.sort(key=lambda each: -each.used)
    size = sum(each.size for each in there)
    if as_json:
        document = {"schema_version": 1, "root": str(layout.root), "objects": len(there), "size": size}
        rows = [asdict(each) for each in there]
        print(json.dumps(document | {"counters": asdict(counters), "files": rows}, indent=1))
        return
    print(f"{layout.root}: {_files(len(there))}, {format_size(size)}")
    print(
        f"  {counters.hits:,} hits, {counters.misses:,} misses, {counters.fills:,} downloads of "
        f"{format_size(counters.bytes)}, {counters.bypasses:,} read past the cache, {counters.evictions:,} evicted"
    )
    shown = there if everything else there[:20]
    print("\n".join(_line(each) for each in shown), end="\n" if shown else "")
    if len(shown) < len(there):
        print(f"  and {len(there) - len(shown):,} more; --all shows them")


def verify(
    root: _Root = "",
    repair: Annotated[bool, typer.Option("--repair", help="Throw away what is damaged; it is fetched again.")] = False,
    as_json: _Json = False,
) -> None:
    """Read every object and compare it with what was downloaded. Exit code 1 when one is damaged and stays."""
    from ftrun.data.cache import upkeep

    with told():
        layout = _layout(root)
        found = list(upkeep.damages(layout))
        bad = [(each, detail) for each, detail in found if detail is not None]
        removed = upkeep.remove(layout, [each for each, _ in bad]) if repair and bad else 0
    size = sum(each.size for each, _ in found)
    if as_json:
        rows: list[dict[str, Any]] = [asdict(each) | {"detail": detail} for each, detail in bad]
        document = {"schema_version": 1, "root": str(layout.root), "objects": len(found), "size": size}
        print(json.dumps(document | {"damaged": rows, "removed": removed}, indent=1))
    else:
        for each, detail in bad:
            print(f"DAMAGED  {each.url or each.key}: {detail}\n  {each.path}")
        gone = f", {removed} thrown away" if repair and bad else "; --repair throws them away" if bad else ""
        print(f"{layout.root}: {_files(len(found))}, {format_size(size)} read, {len(bad)} damaged{gone}")
    if len(bad) > removed:
        raise SystemExit(ExitCode.FAILED)


def clear(root: _Root = "", as_json: _Json = False) -> None:
    """Throw away everything that nobody reads at the moment."""
    from ftrun.data.cache import upkeep
    from ftrun.data.cache.layout import OtherVersion

    with told():
        layout = _layout(root, of_any_version=True)
        try:
            layout.check()
        except OtherVersion:
            upkeep.discard(layout)
            cleared = upkeep.Cleared(0, 0, 0)
        else:
            cleared = upkeep.clear(layout)
    if as_json:
        print(json.dumps({"schema_version": 1, "root": str(layout.root)} | asdict(cleared), indent=1))
        return
    stayed = f"; {_files(cleared.in_use)} in use and kept" if cleared.in_use else ""
    print(f"{layout.root}: {_files(cleared.objects)} thrown away, {format_size(cleared.size)}{stayed}")


def _layout(root: str, *, of_any_version: bool = False) -> Layout:
    from ftrun.data.cache import settings
    from ftrun.data.cache.layout import Layout

    layout = Layout(settings.read(os.environ, root).root)
    if not layout.home.is_dir():
        inside = f" ({layout.root.parent}, perhaps)" if (layout.root / "VERSION").exists() else ""
        raise UsageError(f"there is no data cache of yours in {layout.root}; name its directory with --root{inside}")
    if not of_any_version:
        layout.check()
    return layout


def _files(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"


def _line(each: CachedObject) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used))
    return f"  {when}  {format_size(each.size):>10}  {each.url or each.key}"


def _commands() -> typer.Typer:
    functions: dict[str, Callable[..., None]] = {"ls": ls, "verify": verify, "clear": clear}
    commands = typer.Typer(no_args_is_help=True, help="Look at this node's cache of data files, verify it, clear it.")
    for name, function in functions.items():
        commands.command(name)(function)
    return commands


app = _commands()
