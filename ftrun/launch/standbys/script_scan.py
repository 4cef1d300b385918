"""What a script's text says about its start: which packages it imports, and whether it sets variables before that.

A standby imports packages before the script runs. Where the script sets a variable first, and the package reads it
when it is imported (``OMP_NUM_THREADS``, ``HF_HOME``), that would change what the script gets: such packages are left
to the script. Text is all that is looked at, line by line, in the modules beside the script too; nothing is run.

Standard library only.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Stamp = tuple[int, int]

_MOST_BYTES = 2_000_000
_STATEMENT = re.compile(
    r"""^[ \t]*from[ \t]+(?P<source>[\w.]+)[ \t]+import[ \t]*(?P<names>[^\n#]*)
      | ^[ \t]*import[ \t]+(?P<modules>[^\n#;]+)
      | \benviron\b[ \t]*\[[ \t]*(?:["'](?P<set>\w+)["'])?[^\]\n]*\][ \t]*=(?!=)
      | \benviron\.(?:setdefault|pop)\([ \t]*(?:["'](?P<default>\w+)["'])?
      | \b(?:putenv|unsetenv)\([ \t]*(?:["'](?P<put>\w+)["'])?
      | \b(?P<any>environ\.(?:update|clear)\(|environ[ \t]*\|=|load_dotenv\()
    """,
    re.MULTILINE | re.VERBOSE,
)
_READ_WHEN_USED = re.compile(
    r"CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING|DEVICE_ORDER)|NCCL_\w+|GLOO_\w+|TORCH_NCCL_\w+|WANDB_\w+|MASTER_(ADDR|PORT)"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|TOKENIZERS_PARALLELISM|CUBLAS_WORKSPACE_CONFIG|PYTHON(HASHSEED|WARNINGS)"
)


@dataclass(frozen=True)
class Scan:
    """What a script's text says.

    Attributes:
        packages: top-level names of all that it imports.
        variables: variables that it sets and that a package may read when it is imported; ``?`` for an unknown one.
        before: packages that it imports before it sets the first of them.
        optimizes: it speaks of optimizers.
        files: what was read, with time and size.
    """

    packages: frozenset[str] = frozenset()
    variables: tuple[str, ...] = ()
    before: frozenset[str] = frozenset()
    optimizes: bool = False
    files: tuple[tuple[str, Stamp], ...] = ()

    @property
    def outdated(self) -> bool:
        """Whether a file has changed since it was read."""
        return any(_stamp(Path(path)) != stamp for path, stamp in self.files)


def scan(arguments: Sequence[str], cwd: str) -> Scan | None:
    """Read the script that a bootstrap's arguments name; None where its file can't be found."""
    way, *rest = arguments or ("",)
    if way == "-m":
        place = Path(cwd)
        file = _module_file(place, rest[0]) if rest else None
    else:
        name = rest[0] if way == "--run-path" and rest else way
        file = Path(cwd, name)
        # What it imports from beside it counts, and that is beside what a link points to.
        place = Path(os.path.realpath(file)).parent
    if file is None or not file.is_file():
        return None
    reader = _Reader(place)
    reader.read(file)
    return reader.scan()


@dataclass
class _Reader:
    """Follows the imports of a script through the modules beside it, in the order of their text."""

    place: Path
    packages: set[str] = field(default_factory=set)
    before: set[str] = field(default_factory=set)
    variables: list[str] = field(default_factory=list)
    files: dict[Path, Stamp] = field(default_factory=dict)
    optimizes: bool = False
    left: int = _MOST_BYTES

    def scan(self) -> Scan:
        before = self.before if self.variables else self.packages
        files = tuple((str(path), stamp) for path, stamp in self.files.items())
        return Scan(frozenset(self.packages), tuple(self.variables), frozenset(before), self.optimizes, files)

    def read(self, file: Path) -> None:
        stamp = _stamp(file)
        if stamp is None or file in self.files or stamp[1] > self.left:
            return
        self.left -= stamp[1]
        self.files[file] = stamp
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        self.optimizes = self.optimizes or "optim" in text
        for found in _STATEMENT.finditer(text):
            if found["source"] or found["modules"]:
                for module in _modules(found):
                    self._imported(module, file)
            else:
                self._sets(found["set"] or found["default"] or found["put"] or "?")

    def _sets(self, variable: str) -> None:
        if not _READ_WHEN_USED.fullmatch(variable):
            if not self.variables:
                self.before = set(self.packages)
            self.variables.append(variable)

    def _imported(self, module: str, by: Path) -> None:
        parts = module.lstrip(".").split(".")
        dots = len(module) - len(module.lstrip("."))
        places = [self.place] if dots == 0 else [by.parent, *by.parent.parents][dots - 1 : dots]
        for place in places:
            for end in range(1, len(parts) + 1):
                own = _module_file(place, ".".join(parts[:end]))
                if own is not None:
                    self.read(own)
                elif end == 1 and dots == 0:
                    self.packages.add(parts[0])


def _modules(found: re.Match[str]) -> Iterator[str]:
    if found["modules"]:
        for each in found["modules"].split(","):
            words = each.split()
            if words:
                yield words[0]
        return
    source = found["source"]
    if source.strip("."):
        yield source
    for each in found["names"].strip("() \t").split(","):
        words = each.split()
        if words and words[0].isidentifier():
            yield f"{source}{'' if source.endswith('.') else '.'}{words[0]}"


def _module_file(place: Path, name: str) -> Path | None:
    path = place.joinpath(*name.split("."))
    for candidate in (path / "__init__.py", path.with_name(f"{path.name}.py")):
        if name and candidate.is_file():
            return candidate
    return None


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size
