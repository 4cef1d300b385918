"""Names and bytes under the hands of a program, and which of them a crash may leave."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from power_loss import log
from power_loss.torn import Change, apply, contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Tree = dict[str, "File | None"]  # None: a directory


@dataclass(eq=False)
class File:
    """A file: its bytes as of the last sync, and what was done since."""

    durable: bytes = b""
    changes: tuple[Change, ...] = ()
    current: bytes = b""
    _contents: tuple[tuple[Change, ...], list[bytes]] | None = None

    def change(self, change: Change) -> None:
        self.changes = (*self.changes, change)
        self.current = apply(self.current, change)

    def sync(self) -> None:
        self.durable, self.changes = self.current, ()

    def contents(self) -> list[bytes]:
        """What a crash may leave in it."""
        if self._contents is None or self._contents[0] is not self.changes:
            self._contents = (self.changes, contents(self.durable, self.changes))
        return self._contents[1]


@dataclass(eq=False)
class Name:
    """A name in a directory: what it stood for since the last sync of the directory, and from when on."""

    history: list[tuple[int, Node | None]]

    @property
    def current(self) -> Node | None:
        return self.history[-1][1]


@dataclass(eq=False)
class Directory:
    """A directory."""

    names: dict[str, Name] = field(default_factory=dict)

    def sync(self) -> None:
        for name in self.names.values():
            del name.history[:-1]

    def set(self, name: str, when: int, node: Node | None) -> Name:
        entry = self.names.setdefault(name, Name([(-1, None)]))
        entry.history.append((when, node))
        return entry


Node = File | Directory


@dataclass(frozen=True)
class Move:
    """A rename: the old name goes no sooner than the new one comes."""

    when: int
    source: Name
    target: Name
    lingers: bool  # a file may be found under both names, a directory never

    def allows(self, chosen: dict[Name, int]) -> bool:
        # A name whose directory is lost stands for nothing, and nothing can be said of it.
        if self.source not in chosen or self.target not in chosen:
            return True
        gone, come = chosen[self.source] >= self.when, chosen[self.target] >= self.when
        return come if gone else self.lingers or not come


class Disk:
    """Replays operations."""

    def __init__(self) -> None:
        self.top = Directory()
        self._nodes: dict[int, Node] = {}
        self._moves: list[Move] = []
        self._when = 0

    def do(self, op: log.Op) -> None:
        """Perform one operation.

        Raises:
            ValueError: it contradicts those before it.
        """
        self._when += 1
        if op.kind == log.SYNC:
            self.sync()
        elif op.kind in (log.WRITE, log.TRUNCATE, log.EXTEND, log.FSYNC):
            self._do_with_node(op)
        elif op.name not in ("", ".") and op.kind != log.UNSEEN:
            self._do_with_name(op)
        elif op.kind == log.CREATE:
            self._nodes[op.inode] = File()  # O_TMPFILE: it has no name yet
        elif op.kind == log.MKDIR:
            self._nodes[op.inode] = self.top

    def sync(self) -> None:
        """Everything is durable."""
        for node in _nodes(self.top):
            node.sync()

    def lookup(self, path: str) -> Node | None:
        """What a path stands for now."""
        node: Node | None = self.top
        for part in path.split("/"):
            entry = node.names.get(part) if isinstance(node, Directory) else None
            node = entry.current if entry is not None else None
        return node

    def node(self, inode: int) -> Node | None:
        """What has an inode."""
        return self._nodes.get(inode)

    def current(self, within: str) -> dict[str, bytes | None]:
        """Files and directories as the program sees them, by path; None for directories."""
        tree = next(self.trees([within], lambda options: options[-1:]), {})
        return {path: None if file is None else file.current for path, file in tree.items()}

    def trees(self, within: Sequence[str], choose: Callable[[Sequence[_Choice]], Iterable[_Choice]]) -> Iterator[Tree]:
        """What names a crash may leave. ``choose`` says which conditions of a name are looked at."""
        todo = [(path, self.top.names[path]) for path in within if path in self.top.names]
        self._moves = [each for each in self._moves if len(each.source.history) > 1 or len(each.target.history) > 1]
        for tree, chosen in _expand(todo, {}, {}, choose):
            if all(move.allows(chosen) for move in self._moves):
                yield dict(tree)

    def _do_with_node(self, op: log.Op) -> None:
        node = self._nodes.get(op.inode)
        if op.kind == log.FSYNC:
            if node is not None:
                node.sync()
        elif not isinstance(node, File):
            raise ValueError(f"{op} speaks of no known file")
        elif op.kind == log.WRITE:
            node.change(Change(op.offset, op.data))
        else:
            node.change(Change(op.offset, grows_only=op.kind == log.EXTEND))

    def _do_with_name(self, op: log.Op) -> None:
        directory, name = self._parent(op.name)
        if op.kind in (log.UNLINK, log.RMDIR):
            directory.set(name, self._when, None)
        elif op.kind == log.RENAME:
            self._rename(op, directory, name)
        else:
            node = self._nodes.get(op.inode) if op.kind == log.LINK else _NEW[op.kind]()
            if node is None:
                raise ValueError(f"{op} links no known file")
            self._nodes[op.inode] = node
            directory.set(name, self._when, node)

    def _rename(self, op: log.Op, directory: Directory, name: str) -> None:
        node = self.lookup(op.path)
        if node is None:
            raise ValueError(f"{op} moves no known file")
        if node is self.lookup(op.target):  # two names of one file: POSIX does nothing
            return
        old_directory, old_name = self._parent(op.path)
        source = old_directory.set(old_name, self._when, None)
        target = directory.set(name, self._when, node)
        self._moves.append(Move(self._when, source, target, isinstance(node, File)))

    def _parent(self, path: str) -> tuple[Directory, str]:
        above, _, name = path.rpartition("/")
        directory = self.lookup(above) if above else self.top
        if not isinstance(directory, Directory):
            raise ValueError(f"{above} is no known directory")
        return directory, name


_NEW: dict[int, Callable[[], Node]] = {log.CREATE: File, log.MKDIR: Directory}
_Choice = tuple[int, Node | None]


def _expand(
    todo: list[tuple[str, Name]],
    chosen: dict[Name, int],
    tree: Tree,
    choose: Callable[[Sequence[_Choice]], Iterable[_Choice]],
) -> Iterator[tuple[Tree, dict[Name, int]]]:
    if not todo:
        yield tree, chosen
        return
    (path, name), rest = todo[0], todo[1:]
    for when, node in choose(name.history):
        chosen[name] = when
        below = []
        if node is not None:
            tree[path] = node if isinstance(node, File) else None
        if isinstance(node, Directory):
            below = [(f"{path}/{part}", entry) for part, entry in node.names.items()]
        yield from _expand([*below, *rest], chosen, tree, choose)
        tree.pop(path, None)
        del chosen[name]


def _nodes(directory: Directory) -> Iterator[Node]:
    """Everything that any name stands or stood for."""
    yield directory
    for name in directory.names.values():
        for _, node in name.history:
            if isinstance(node, Directory):
                yield from _nodes(node)
            elif node is not None:
                yield node


def fillings(tree: Tree) -> Iterator[dict[str, bytes | None]]:
    """What bytes a crash may leave under the names of a tree."""
    files = list({id(file): file for file in tree.values() if file is not None}.values())
    for combination in itertools.product(*(file.contents() for file in files)):
        content = dict(zip(map(id, files), combination, strict=True))
        yield {path: None if file is None else content[id(file)] for path, file in tree.items()}
