"""The command line of ``ftrun run``: torch's own parser, with one group of ftrun's options added.

Building on the installed torch's parser brings every option, spelling, abbreviation and ``PET_*`` variable of that
torch along, also those of versions to come.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from ftrun.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_OWN = "ftrun_"
_SCRIPT = ("training_script", "training_script_args")
_AMBIGUOUS = "ambiguous option: "


class _AmbiguousOption(ConfigError):
    """An abbreviation of several options.

    Attributes:
        word: as it was typed.
    """

    def __init__(self, findings: list[str], word: str) -> None:
        super().__init__(findings)
        self.word = word


@dataclass(frozen=True)
class CommandLine:
    """What was typed, and nothing else.

    Attributes:
        launch: torchrun's options that were given, by destination.
        script: the training script, module or command; None if not given.
        script_args: everything after it.
        job_file, name, run_dir, fresh, dry_run, json, sets, allow_new_total: ftrun's own options.
    """

    launch: dict[str, Any]
    script: str | None
    script_args: list[str]
    job_file: str | None = None
    name: str | None = None
    run_dir: str | None = None
    fresh: bool = False
    dry_run: bool = False
    json: bool = False
    sets: list[str] = field(default_factory=list)
    allow_new_total: bool = False


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Import torch such that its C++ code says nothing here, unless the user's environment has it otherwise.

    It reads the variable once. A node that is lost would be worth twenty lines of addresses for each connection to it,
    and the launcher says it in one; workers, which are started with this environment later, say what they like.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    given = os.environ.get(name)
    os.environ.setdefault(name, "FATAL")
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]


class LaunchParser:
    """Torch's parser, extended. Importing torch happens when one is made."""

    def __init__(self) -> None:
        with _quiet_torch():
            from torch.distributed.run import get_args_parser

        try:
            self._parser: argparse.ArgumentParser = get_args_parser()
        except ValueError as error:
            raise ConfigError(
                [f"ftrun: a PET_* variable of a flag holds neither 0 nor 1 ({error}). See `env | grep PET_`."]
            ) from error
        self._parser.prog = "ftrun"
        self._parser.usage = "ftrun [run] [options] SCRIPT [arguments of the script]"
        self._parser.description = "Launch a training script on this node, as torchrun does, and make faults cheap."
        self._torch_actions = [a for a in self._parser._actions if a.dest not in ("help", *_SCRIPT)]
        self._values = {action.dest: action.default for action in self._torch_actions}
        _add_own(self._parser)
        groups = self._parser._action_groups
        groups.insert(0, groups.pop())  # ftrun's few options before torchrun's many
        self._adapt()

    def _adapt(self) -> None:
        parser = self._parser
        nproc = next(a for a in self._torch_actions if a.dest == "nproc_per_node")
        nproc.option_strings = [*nproc.option_strings, "--nproc"]
        parser._option_string_actions["--nproc"] = nproc
        for action in parser._actions:
            if action.dest != "help":
                action.default = argparse.SUPPRESS
            if action.dest == "max_restarts":
                action.help = f"{action.help} Without it ftrun restarts as long as new commits come."
            if action.dest == "training_script":
                action.nargs = "?"  # a job file may name it
        find_all = parser._get_option_tuples

        def only_torch_abbreviates(option: str) -> list[Any]:
            """Abbreviations reach torch's options alone; two spellings of one option are one match."""
            found: dict[str, Any] = {}
            for each in find_all(option):
                action, spelling = each[:2]
                # Not an abbreviation: -cJOB.yaml is the short option with its value attached.
                attached = not option.startswith("--") and spelling == option[:2]
                if attached or not action.dest.startswith(_OWN):
                    found.setdefault(action.dest, each)
            return list(found.values())

        parser._get_option_tuples = only_torch_abbreviates  # type: ignore[method-assign, assignment]
        parser.error = self._refuse  # type: ignore[method-assign]

    def _refuse(self, message: str) -> NoReturn:
        findings = [f"ftrun: {message}"]
        if message.startswith("unrecognized arguments:"):
            unknown = message.removeprefix("unrecognized arguments:").split()
            options = [each for each in unknown if each.startswith("-")] or unknown
            findings = [self._unknown(each) for each in options]
        findings.append(
            "`ftrun run --help` lists all options. Those of the script come after it, or into args: of a job file."
        )
        if message.startswith(_AMBIGUOUS):
            raise _AmbiguousOption(findings, message.removeprefix(_AMBIGUOUS).partition(" could match ")[0])
        raise ConfigError(findings)

    def _unknown(self, option: str) -> str:
        known = list(self._parser._option_string_actions)
        close = difflib.get_close_matches(option.split("=")[0], known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"ftrun: unknown option {option}{hint}"

    def parse(self, argv: Sequence[str]) -> CommandLine:
        """Read a command line.

        Raises:
            ConfigError: it can't be understood; suggestions included.
            SystemExit: ``--help`` was asked for and has been printed.
        """
        given = vars(self._parsed(list(argv)))
        own = {key.removeprefix(_OWN): given.pop(key) for key in list(given) if key.startswith(_OWN)}
        script = given.pop("training_script", None)
        script_args = given.pop("training_script_args", [])
        return CommandLine(launch=given, script=script, script_args=script_args, **own)

    def _parsed(self, argv: list[str]) -> argparse.Namespace:
        """What argparse makes of it. In older Pythons it looks for abbreviations among the script's words, too."""
        try:
            return self._parser.parse_args(argv)
        except _AmbiguousOption as refused:
            begin = argv.index(refused.word) if refused.word in argv else 0
            with contextlib.suppress(ConfigError):
                given = self._parser.parse_args(argv[:begin])
                if "training_script" in given:
                    given.training_script_args += argv[begin:]
                    return given
            raise

    @property
    def names(self) -> list[str]:
        """Destinations of torchrun's options: the keys that ``launch:`` may have in a job file."""
        return [action.dest for action in self._torch_actions]

    def defaults(self) -> dict[str, Any]:
        """Torch's defaults, those of ``PET_*`` variables included.

        Raises:
            ConfigError: a variable holds what its option doesn't take.
        """
        return {name: self._default(name, value) for name, value in self._values.items()}

    def _default(self, name: str, value: Any) -> Any:
        try:
            return self.convert(name, value)
        except ValueError as error:
            raise ConfigError([f"ftrun: the variable PET_{name.upper()} {error}. Correct or unset it."]) from error

    def from_environment(self, environment: Mapping[str, str]) -> set[str]:
        """Which options got their default from a ``PET_*`` variable."""
        return {a.dest for a in self._torch_actions if f"PET_{a.dest.upper()}" in environment}

    def convert(self, name: str, value: Any) -> Any:
        """A value from a job file or a variable, in the type that torch's parser would give it.

        Raises:
            ValueError: the option doesn't take this value; the message says what it takes.
        """
        action = next(a for a in self._torch_actions if a.dest == name)
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise ValueError("takes true or false")
            return value
        if value is None:
            return value
        if isinstance(value, list):
            if not isinstance(_typed(action, ""), list):
                raise ValueError("takes one value, not a list")
            return [str(item) for item in value]
        if isinstance(value, bool):
            raise ValueError("takes a value, not true or false")
        return _typed(action, str(value))


def _typed(action: argparse.Action, text: str) -> Any:
    convert = action.type if callable(action.type) else str
    try:
        value = convert(text)
    except (ValueError, TypeError) as error:
        raise ValueError(f"takes {getattr(convert, '__name__', 'another value')}, not {text!r}") from error
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"is one of {', '.join(map(str, action.choices))}, not {text!r}")
    return value


def _add_own(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ftrun")

    def add(*names: str, dest: str, **settings: Any) -> None:
        group.add_argument(*names, dest=_OWN + dest, **settings)

    add("-c", "--config", dest="job_file", metavar="JOB.yaml", help="job file; the command line overrides it")
    add("--name", dest="name", metavar="NAME", help="name of the run: runs/NAME, which continues where it stopped")
    add("--run-dir", dest="run_dir", metavar="DIR", help="run directory, in place of runs/NAME")
    flag: dict[str, Any] = {"action": "store_true"}
    add("--fresh", dest="fresh", help="start over; the old run directory is moved aside", **flag)
    add("--dry-run", dest="dry_run", help="show what would be started and resumed, and start nothing", **flag)
    add("--json", dest="json", help="with --dry-run: as JSON", **flag)
    add("--set", dest="sets", action="append", metavar="A.B=C", help="set a value of the job file")
    add(
        "--allow-new-total",
        dest="allow_new_total",
        help="resume although the script asks for another total number of steps than the checkpoint",
        **flag,
    )
