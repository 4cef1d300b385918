"""``ftrun ckpt show``: one checkpoint, from its manifest and one rank's record."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftrun.cli.ckpt_place import NAME_HELP, WHERE_HELP, locate, told
from ftrun.config.units import format_size
from ftrun.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from ftrun.checkpoint.layout import AttemptName, Root
    from ftrun.checkpoint.manifest import Manifest
    from ftrun.checkpoint.reader import AttemptInfo
    from ftrun.checkpoint.records import RankRecord

_MOST_TENSORS = 40


def show(
    where: Annotated[str, typer.Argument(help=WHERE_HELP)] = "",
    name: Annotated[str, typer.Argument(help=NAME_HELP)] = "",
    rank: Annotated[int, typer.Option(help="Whose tensors to list.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Show a checkpoint: what it is, its ranks and files, and the tensors of one rank."""
    with told():
        place = locate(where, name, Path.cwd())
        info = place.info()
        document = describe(place.root, info, rank)
    print(json.dumps(document, indent=1) if as_json else _text(document))


def describe(root: Root, info: AttemptInfo, rank: int) -> dict[str, Any]:
    """A checkpoint as one JSON document.

    Raises:
        UsageError: there is no such rank.
        OSError: the root can't be read.
    """
    manifest = info.manifest
    document: dict[str, Any] = {
        "schema_version": 1,
        "root": root.url,
        "name": str(info.name),
        "status": info.status,
        "reason": info.reason,
        "pinned": info.name in root.pins(),
        "size": info.size,
        "manifest": None,
        "ranks": [],
        "tensors": None,
    }
    if manifest is None:
        return document
    if rank >= manifest.world_size:
        raise UsageError(f"checkpoint {info.name} has ranks 0 to {manifest.world_size - 1}, and no rank {rank}")
    document["manifest"] = {key: value for key, value in manifest.__dict__.items() if key != "files"}
    document["ranks"] = _ranks(manifest)
    document["tensors"] = _tensors(root, info.name, manifest, rank)
    return document


def _ranks(manifest: Manifest) -> list[dict[str, Any]]:
    files: dict[int, dict[str, int]] = {}
    for file, record in sorted(manifest.files.items()):
        match = re.match(r"r(\d+)\.", file)
        if match is not None:
            files.setdefault(int(match[1]), {})[file] = record.size
    return [{"rank": rank, "size": sum(sizes.values()), "files": sizes} for rank, sizes in sorted(files.items())]


def _tensors(root: Root, name: AttemptName, manifest: Manifest, rank: int) -> dict[str, Any]:
    try:
        record = _record(root, name, manifest, rank)
    except (ValueError, OSError) as error:
        return {"rank": rank, "problem": str(error), "count": 0, "bytes": 0, "list": []}
    rows = [
        {"name": tensor, "dtype": entry.dtype, "shape": list(entry.shape), "ranks": entry.ranks}
        for tensor, entry in record.tensors.items()
    ]
    total = sum(math.prod(entry.shape) * item_size(entry.dtype) for entry in record.tensors.values())
    return {"rank": rank, "problem": None, "count": len(rows), "bytes": total, "list": rows}


def _record(root: Root, name: AttemptName, manifest: Manifest, rank: int) -> RankRecord:
    from ftrun.checkpoint.checksums import record_of
    from ftrun.checkpoint.layout import attempt_key, rank_json
    from ftrun.checkpoint.records import RankRecord

    file = rank_json(rank)
    content = root.read(attempt_key(name, file))
    if record_of(content) != manifest.files.get(file):
        raise CheckpointError(f"{file} is not what was committed: `ftrun ckpt verify` says where it is damaged")
    try:
        return RankRecord.from_bytes(content)
    except ValueError as error:
        raise ValueError(f"{file} {error}") from error


def item_size(dtype: str) -> int:
    """Bytes of one element: the first number in a dtype's name is its bits, where it has one."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def _text(document: dict[str, Any]) -> str:
    status = f"{document['status']}{', pinned' if document['pinned'] else ''}"
    lines = [f"{document['name']}   {status}{'   ' if document['reason'] else ''}{document['reason']}"]
    lines.append(f"root        {document['root']}")
    manifest = document["manifest"]
    if manifest is None:
        return "\n".join([*lines, f"size        {format_size(document['size'])}"])
    total = f" of {manifest['total']:,}" if manifest["total"] is not None else ""
    lines += [
        f"run         {manifest['run_id']}",
        f"step        {manifest['step']:,}{total}, saved for {manifest['reason'] or 'no reason given'}",
        f"data        {json.dumps(manifest['data'])}",
        f"parent      {manifest['parent'] or 'none'}",
        f"written     {manifest['written_at']} by ftrun {manifest['ftrun']}, torch {manifest['torch']}",
        f"ranks       {manifest['world_size']} on {manifest['nodes']} node{'s' if manifest['nodes'] != 1 else ''}",
        f"size        {format_size(document['size'])}{_span(document['ranks'])}",
    ]
    return "\n".join([*lines, *_tensor_lines(document["tensors"])])


def _span(ranks: list[dict[str, Any]]) -> str:
    if len(ranks) < 2:
        return ""
    sizes = [each["size"] for each in ranks]
    return f", {format_size(min(sizes))} to {format_size(max(sizes))} from each rank"


def _tensor_lines(tensors: dict[str, Any]) -> list[str]:
    if tensors["problem"]:
        return [f"tensors     not known: {tensors['problem']}"]
    lines = [f"tensors     {tensors['count']:,} of rank {tensors['rank']}, {format_size(tensors['bytes'])} as a whole"]
    for each in tensors["list"][:_MOST_TENSORS]:
        shape = "x".join(map(str, each["shape"])) or "scalar"
        lines.append(f"  {each['dtype']:<14} {shape:<20} ranks {each['ranks']:<8} {each['name']}")
    left = tensors["count"] - _MOST_TENSORS
    return [*lines, f"  and {left:,} more: --json lists them"] if left > 0 else lines
