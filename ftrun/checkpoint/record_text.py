"""Records of ranks as bytes, save after save: what the one before said alike is not put into words again.

Thousands of tensors stay where they were, and so does what is said of them. To say it each time would take the
interpreter away from training for milliseconds.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ftrun.checkpoint.sealed import canonical, seal_body
from ftrun.checkpoint.words import TAG

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftrun.checkpoint.plan.pieces import Piece
    from ftrun.checkpoint.records import RankRecord, TensorEntry


class RecordText:
    """Says what :meth:`ftrun.checkpoint.records.RankRecord.to_bytes` says, byte for byte. One thread at a time."""

    def __init__(self) -> None:
        self._pieces: tuple[Sequence[Piece], str] = ((), "[]")
        self._tensors: tuple[Mapping[str, TensorEntry], str] = ({}, "{}")
        self._entries: dict[str, tuple[TensorEntry, str]] = {}
        self._blocks: dict[str, tuple[Any, str]] = {}

    def to_bytes(self, record: RankRecord, settled: Mapping[str, Any]) -> bytes:
        """The record's content.

        Args:
            record: the record.
            settled: parts of its tree that say the same as long as they are the same objects, by their paths.

        Raises:
            ValueError: the data position holds an infinite float or NaN.
            TypeError: the data position holds something that is no JSON.
        """
        head = canonical(record.head(), sort=False).decode("ascii")
        tree = self._tree(record.tree, "", settled, _above(settled))
        self._blocks = {path: known for path, known in self._blocks.items() if path in settled}
        tensors, pieces = self._said_of(record.tensors), self._said_of_pieces(record.pieces)
        return seal_body(f'{head[:-1]},"tree":{tree},"tensors":{tensors},"pieces":{pieces}}}'.encode("ascii"))

    def _tree(self, node: Any, path: str, settled: Mapping[str, Any], above: frozenset[str]) -> str:
        if path in settled and node is settled[path]:
            return self._block(path, node)
        if path not in above or type(node) is not dict:
            return _text(node)
        if TAG not in node:
            said = {
                key: self._tree(item, f"{path}/{key}" if path else key, settled, above) for key, item in node.items()
            }
        else:
            said = {
                key: self._tree(item, path, settled, above) if key == "of" else _text(item)
                for key, item in node.items()
            }
        return "{" + ",".join([f"{_text(key)}:{text}" for key, text in said.items()]) + "}"

    def _block(self, path: str, node: Any) -> str:
        known = self._blocks.get(path)
        if known is None or known[0] is not node:
            known = self._blocks[path] = (node, _text(node))
        return known[1]

    def _said_of(self, tensors: Mapping[str, TensorEntry]) -> str:
        if tensors is not self._tensors[0]:
            self._entries = {name: self._entry(name, entry) for name, entry in tensors.items()}
            self._tensors = tensors, "{" + ",".join([text for _, text in self._entries.values()]) + "}"
        return self._tensors[1]

    def _entry(self, name: str, entry: TensorEntry) -> tuple[TensorEntry, str]:
        known = self._entries.get(name)
        if known is not None and known[0] is entry:
            return known
        return entry, f"{_text(name)}:{_text(entry.to_json())}"

    def _said_of_pieces(self, pieces: Sequence[Piece]) -> str:
        if pieces is not self._pieces[0]:
            self._pieces = pieces, _text([each.to_json() for each in pieces])
        return self._pieces[1]


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _above(paths: Mapping[str, Any]) -> frozenset[str]:
    """Paths of what may have one of some paths below it, as far as slashes tell."""
    found = {""}
    for path in paths:
        parts = path.split("/")
        found.update("/".join(parts[:count]) for count in range(1, len(parts) + 1))
    return frozenset(found)
