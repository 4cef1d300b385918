"""YAML text to a tree of plain values, and the place where each was written.

Scalars follow the core schema of YAML 1.2: ``1:4`` and ``10:00:00`` are text and not numbers to the base of
60, ``on`` and ``no`` are text, ``1e-3`` is a number. A key given twice is an error. Lists become tuples, and
keys are always text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from ftrun.config.findings import Finding, Mark, Path, config_error, dotted, position

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Value = str | int | float | bool | tuple["Value", ...] | dict[str, "Value"] | None
"""What a job file is made of."""

_TAG = "tag:yaml.org,2002:"
# Aliases can double a file's size at every level; no honest job comes near this.
_MAX_VALUES = 20_000

_CORE = [
    ("null", r"~|null|Null|NULL|"),
    ("bool", r"true|True|TRUE|false|False|FALSE"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
    ("merge", r"<<"),
]

_HINTS = [
    ("mapping values are not allowed", "check the indentation, or quote a value that holds ': '"),
    ("character '\\t'", "indent with spaces, not with tabs"),
    ("cannot start any token", "put the value in quotes"),
    ("undefined alias", "put a value that begins with '*' in quotes"),
]


class _Loader(yaml.SafeLoader):
    """Composes nodes with the scalars of YAML 1.2."""


# The key None is for resolvers that look at any first character.
_Loader.yaml_implicit_resolvers = {None: [(_TAG + name, re.compile(f"(?:{form})$")) for name, form in _CORE]}


@dataclass(frozen=True)
class Document:
    """A parsed text.

    Attributes:
        value: the tree.
        marks: where each value of the tree was written, by its path.
        findings: mistakes that still leave a tree, such as a key given twice.
        text: the source, for excerpts.
    """

    value: Value
    marks: Mapping[Path, Mark]
    findings: tuple[Finding, ...]
    text: str


def parse(text: str, source: str) -> Document:
    """Parse one YAML document; an empty one has the value None.

    Raises:
        ConfigError: the text is no YAML, or it nests or grows without end.
    """
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        builder = _Builder(source)
        value = None if node is None else builder.build(node, (), _start(node))
    except yaml.reader.ReaderError as error:
        found = f"character #x{ord(text[error.position]):04x} is not allowed in YAML; remove it"
        raise config_error([Finding(source, position(text, error.position), found)], text) from None
    except yaml.MarkedYAMLError as error:
        raise config_error([_syntax(error, source)], text) from None
    except RecursionError:
        raise config_error([Finding(source, None, "nested too deeply; flatten the file")]) from None
    finally:
        if loader is not None:
            loader.dispose()
    return Document(value, builder.marks, tuple(builder.findings), text)


def _syntax(error: yaml.MarkedYAMLError, source: str) -> Finding:
    """One line out of the parser's problem, its context and, for the usual slips, what to do."""
    problem = error.problem or error.context or "not valid YAML"
    mark = error.problem_mark or error.context_mark
    if "another document" in problem:
        problem = "a second document begins here; keep one job in a file"
    elif error.context and error.context != problem and error.context_mark is not None:
        problem += f" ({error.context} that begins on line {error.context_mark.line + 1})"
    hint = next((hint for words, hint in _HINTS if words in problem), "")
    at = None if mark is None else (mark.line + 1, mark.column + 1)
    return Finding(source, at, f"{problem}; {hint}" if hint else problem)


def _start(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


class _Builder:
    """Walks composed nodes once: values out, marks and findings beside them."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.marks: dict[Path, Mark] = {}
        self.findings: list[Finding] = []
        self._open: set[int] = set()

    def build(self, node: yaml.Node, path: Path, key: tuple[int, int]) -> Value:
        if len(self.marks) > _MAX_VALUES:
            raise config_error([Finding(self.source, None, f"holds more than {_MAX_VALUES} values; use fewer aliases")])
        text = self._text(node) if isinstance(node, yaml.ScalarNode) else None
        self.marks[path] = Mark(self.source, key, _start(node), text)
        if text is not None:
            return self._scalar(node, text)
        if id(node) in self._open:
            self._find(node, f"{dotted(path)} holds itself; remove the alias")
            return None
        self._open.add(id(node))
        value = self._collection(node, path)
        self._open.discard(id(node))
        return value

    def _collection(self, node: yaml.Node, path: Path) -> Value:
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            self._find(node, f"tag '{_short(node.tag)}' is not supported; remove it")
        if isinstance(node, yaml.MappingNode):
            pairs = self._pairs(node, path)
            return {name: self.build(child, (*path, name), _start(key)) for name, (key, child) in pairs.items()}
        return tuple(self.build(child, (*path, index), _start(child)) for index, child in enumerate(node.value))

    def _pairs(self, node: yaml.MappingNode, path: Path) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Key and value nodes by key. Keys written here win over merged ones, earlier merges over later."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, child in node.value:
            if key.tag == _TAG + "merge":
                merged = self._merged(child, path) | merged
            elif not isinstance(key, yaml.ScalarNode):
                self._find(key, "a key must be text; put it in quotes")
            elif key.value in own:
                first = _start(own[key.value][0])[0]
                self._find(key, f"duplicate key '{dotted((*path, key.value))}' (first on line {first})")
            else:
                own[key.value] = (key, child)
        return merged | own

    def _merged(self, node: yaml.Node, path: Path) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if isinstance(source, yaml.MappingNode) and id(source) not in self._open:
                self._open.add(id(source))
                pairs = self._pairs(source, path) | pairs
                self._open.discard(id(source))
            else:
                self._find(source, "'<<' takes a section or a list of sections, such as '<<: *defaults'")
        return pairs

    def _text(self, node: yaml.ScalarNode) -> str:
        """The characters of a scalar. JSON writes a rare one as two escapes; here they are one again."""
        try:
            text = str(node.value).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            self._find(node, "holds an escape that is no character of a text; remove it")
        return text

    def _scalar(self, node: yaml.Node, text: str) -> Value:
        read = _READ.get(node.tag)
        if read is None:
            self._find(node, f"tag '{_short(node.tag)}' is not supported; remove it")
            return text
        try:
            return read(text)
        except ValueError:
            self._find(node, f"{text!r} does not fit its tag '{_short(node.tag)}'; remove the tag")
            return None

    def _find(self, node: yaml.Node, text: str) -> None:
        finding = Finding(self.source, _start(node), text)
        # An alias leads to the same node again, by another path.
        if all(finding.at != other.at for other in self.findings):
            self.findings.append(finding)


def _short(tag: str) -> str:
    return tag.replace(_TAG, "!!")


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _int(text: str) -> int:
    # Not int(text, 0): the core schema reads 010 as ten.
    bases = {"0o": 8, "0x": 16}
    return int(text, bases.get(text[:2], 10))


def _float(text: str) -> float:
    # Python spells infinity and not-a-number without YAML's dot.
    return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))


def _null(text: str) -> None:
    del text


_READ: dict[str, Callable[[str], Value]] = {
    _TAG + "str": str,
    _TAG + "merge": str,  # '<<' as a value is just text
    _TAG + "null": _null,
    _TAG + "bool": _bool,
    _TAG + "int": _int,
    _TAG + "float": _float,
}
