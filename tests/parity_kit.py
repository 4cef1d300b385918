"""Runs one command line under torchrun and under ftrun, side by side, and tells what each of them made of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from conftest import NO_COMPILER, SCRIPTS, eventually, held_port, kill_tree
from torch.distributed.run import get_args_parser

if TYPE_CHECKING:
    import argparse
    import signal
    from collections.abc import Iterator, Mapping
    from pathlib import Path

LAUNCHERS = {"theirs": "torch.distributed.run", "ours": "ftrun"}
PROBE = (SCRIPTS / "parity_probe.py").read_text()

_FOREIGN = ("FTRUN_", "PET_", "TORCH", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "LOGLEVEL", "OMP_", "NCCL_", "CUDA_")
_TORCH_LINE = re.compile(r"^[VDIWEC]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ \S+:\d+\] ?")
# From torch's C++ code, with time and thread: whether a connection's name could be looked up, and the like.
_NATIVE_LINE = re.compile(r"^\[[VDIWE]\d{4} \d\d:\d\d:\d\d\.\d+ \S+:\d+\] .*\n?", re.MULTILINE)
_OMP_WARNING = re.compile(r"\*{30,}\nSetting OMP_NUM_THREADS.*?\*{30,}\n", re.DOTALL)
_LAST_SCREEN = re.compile(r"^(?!ftrun )\S+  [^\w\s] \w.*\Z", re.DOTALL | re.MULTILINE)
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_TEMPORARY = re.compile(r"(?<=[/\w]_)[a-z0-9_]{8}(?=/)")


@dataclass(frozen=True)
class Case:
    """One command line, and how it may end.

    Attributes:
        line: options of the launcher, one string as it would be typed, ``{port}`` being a free port.
        target: the script and its arguments.
        env: variables of the launcher.
        stdin: what is piped into the launcher.
        fails: whether it must fail.
        attempts: how many attempts workers must have seen.
        signal: sent to the launcher when all workers have started.
    """

    line: str = ""
    target: tuple[str, ...] = ("probe.py",)
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    fails: bool = False
    attempts: int = 1
    signal: signal.Signals | None = None
    workers: int = 2


@dataclass(frozen=True)
class Outcome:
    """What one launcher made of a case; places and random names are replaced by what they stand for."""

    code: int
    out: str
    err: str
    seen: dict[str, dict[str, Any]]
    signals: list[str]
    logs: dict[str, str]

    def talk(self, who: str) -> list[str]:
        """Lines on stderr that come from the workers."""
        text = _OMP_WARNING.sub("", self.err) if who == "theirs" else _LAST_SCREEN.sub("", self.err)
        lines: list[str] = []
        for line in text.splitlines():
            if who == "theirs" and "torch/distributed/run.py" in line:
                # The launcher's own traceback, to the end: it began with the last "Traceback" line.
                return lines[: len(lines) - 1 - [each[:10] for each in lines[::-1]].index("Traceback ")]
            if line and not _TORCH_LINE.match(line) and not line.startswith("ftrun"):
                lines.append(line)
        return lines

    def torchs_lines(self) -> list[str]:
        """What torch's own loggers say, without time and place."""
        return [_TORCH_LINE.sub("", line) for line in self.err.splitlines() if _TORCH_LINE.match(line)]


def both(case: Case, directory: Path, *, standbys: bool = True) -> tuple[Outcome, Outcome]:
    """Run a case under both launchers at the same time, each in a directory of its own.

    Without ``standbys`` ftrun starts Python for each worker, and saves the time of importing torch for scripts that
    never do.
    """
    options = {who: [] if standbys else without_standbys(who) for who in LAUNCHERS}
    with contextlib.ExitStack() as ports:
        running = {
            who: _start(who, case, directory, options[who], ports.enter_context(held_port())) for who in LAUNCHERS
        }
        return _outcomes(case, running)


def without_standbys(who: str) -> list[str]:
    """Options of a launcher for a run that needs none."""
    return ["--set", "standby.enabled=false"] if who == "ours" else []


def _outcomes(case: Case, running: dict[str, tuple[subprocess.Popen[bytes], Path, int]]) -> tuple[Outcome, Outcome]:
    try:
        if case.signal is not None:
            for who, (process, home, _) in running.items():
                eventually(lambda home=home: len(_reports(home)) == case.workers, what=f"all workers of {who}")
                process.send_signal(case.signal)
        given = "{port}" in case.line + "".join(case.env.values())
        return _finish("theirs", *running["theirs"], given=given), _finish("ours", *running["ours"], given=given)
    finally:
        for process, _, _ in running.values():
            kill_tree(process.pid)
            process.wait(60)


def refused(case: Case, directory: Path) -> tuple[Outcome, Outcome]:
    """What both launchers say to a command line that starts no worker: in forks of this process, which has torch."""
    found = []
    for who, module in LAUNCHERS.items():
        out, err = directory / f"{who}.out", directory / f"{who}.err"
        child = os.fork()
        if child == 0:
            code = 70
            try:
                code = _as_launcher(module, case, directory, out, err)
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found.append(Outcome(code, out.read_text(), err.read_text(), {}, [], {}))
    return found[0], found[1]


def _as_launcher(module: str, case: Case, directory: Path, out: Path, err: Path) -> int:
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115 - to the end
    os.chdir(directory)
    clean = environment(directory, case.env)
    os.environ.clear()
    os.environ.update(clean)
    sys.argv = [module, *case.line.split(), *case.target]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # what would have been the launcher's own last word
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _start(
    who: str, case: Case, directory: Path, options: list[str], port: int
) -> tuple[subprocess.Popen[bytes], Path, int]:
    home = directory / who / "it's here"
    home.mkdir(parents=True)
    _furnish(home)
    words = ["" if word == "''" else word.format(port=port) for word in case.line.split()]
    (home / "stdin").write_text(case.stdin)
    command = [
        sys.executable,
        "-m",
        LAUNCHERS[who],
        *options,
        *words,
        *(word.replace("{home}", str(home)) for word in case.target),
    ]
    with (home / "out").open("w") as out, (home / "err").open("w") as err, (home / "stdin").open() as stdin:
        process = subprocess.Popen(
            command,
            cwd=home,
            env=environment(home, {name: value.replace("{port}", str(port)) for name, value in case.env.items()}),
            stdin=stdin,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    return process, home, port


def _furnish(home: Path) -> None:
    for name in ("probe.py", "pkg/probe.py", "pkg/__main__.py", "folder/__main__.py", "a 'b\"\n$c.py"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(PROBE)
    (home / "pkg/__init__.py").touch()
    (home / "job.yaml").write_text("name: job\n")
    wrapper = home / "wrapper"
    wrapper.write_text(f"#!/bin/sh\nWRAPPED=yes exec '{sys.executable}' \"$@\"\n")
    wrapper.chmod(0o755)
    dist = home / "plugins" / "parity_plugin-1.0.dist-info"
    dist.mkdir(parents=True)
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: parity-plugin\nVersion: 1.0\n")
    (dist / "entry_points.txt").write_text("[torchrun.logs_specs]\nparity = parity_plugin:Specs\n")
    (home / "plugins" / "parity_plugin.py").write_text(
        "from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs\n"
        "class Specs(DefaultLogsSpecs):\n"
        "    def reify(self, envs):\n"
        "        for env in envs.values():\n"
        "            env['PARITY_PLUGIN'] = repr(self._redirects)\n"
        "        return super().reify(envs)\n"
    )


def environment(home: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """What a launcher starts with: this process's variables less all that launchers read."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    filled = {name: value.replace("{home}", str(home)) for name, value in extra.items()}
    filled["PYTHONPATH"] = os.pathsep.join(filter(None, (filled.get("PYTHONPATH"), str(NO_COMPILER))))
    return {**clean, "NO_COLOR": "1", "COLUMNS": "200", "TMPDIR": str(home), **filled}


def _reports(home: Path) -> list[Path]:
    return sorted((home / "seen").glob("[0-9]*.json"))


def _finish(who: str, process: subprocess.Popen[bytes], home: Path, port: int, *, given: bool) -> Outcome:
    code = process.wait(120)

    def plain(text: str) -> str:
        text = text.replace(str(home), "<home>").replace(str(home.parent), "<parent>")
        text = text.replace(str(port), "<port>") if given else text  # else a launcher may have found the same one
        return _UUID.sub("<uuid>", text)

    seen = {path.stem: json.loads(plain(path.read_text())) for path in _reports(home)}
    logs = {plain(_named(path, home)): plain(_tidy(path)) for path in _logs(home)}
    # A file is read back without translation: a carriage return is part of what was said.
    out, err = (_NATIVE_LINE.sub("", (home / name).read_bytes().decode(errors="replace")) for name in ("out", "err"))
    return Outcome(code, plain(out), plain(err), seen, sorted(p.name for p in home.glob("seen/signal-*")), logs)


def _logs(home: Path) -> Iterator[Path]:
    """Files that torchrun's options ask for; its own temporary directories and ftrun's ``runs`` are not among them."""
    for top in ("logs", "launcher.json"):
        path = home / top
        yield from [path] if path.is_file() else (each for each in sorted(path.rglob("*")) if each.is_file())


def _named(path: Path, home: Path) -> str:
    return _TEMPORARY.sub("*", str(path.relative_to(home)))


def _tidy(path: Path) -> str:
    text = _NATIVE_LINE.sub("", path.read_bytes().decode(errors="replace"))
    if path.suffix != ".json":
        return text if path.parent.name.isdecimal() else "".join(sorted(text.splitlines(keepends=True)))
    message = json.loads(text)["message"]
    return message["message"] if isinstance(message, dict) else str(message)


def spellings(case: Case) -> set[str]:
    """The options of torch's launcher, as written in a case; a variable counts as ``PET_NAME``."""
    words = [word.split("=")[0] for word in case.line.split() if word[:1] == "-"]
    short = {word[:2] for word in words if not word.startswith("--")}
    return {word for word in words if word.startswith("--")} | short | {n for n in case.env if n.startswith("PET_")}


def options() -> list[argparse.Action]:
    """Every option of the installed torch's launcher."""
    return [each for each in get_args_parser()._actions if each.option_strings and each.dest != "help"]


def known(case: Case) -> bool:
    """Whether the installed torch has every option of a case; the table is written for the newest."""
    texts = {text for each in options() for text in each.option_strings}
    whole = {word for word in spellings(case) if word in NEWER_OPTIONS or word.replace("_", "-") in NEWER_OPTIONS}
    return {word for word in whole if word[:2] == "--"} <= texts


NEWER_OPTIONS = frozenset(
    {
        "--duplicate-stdout-filters",  # 2.10
        "--duplicate-stderr-filters",  # 2.10
        "--signals-to-handle",  # 2.10
        "--virtual-local-rank",  # 2.10
        "--shutdown-timeout",  # 2.12
        "--log-line-prefix-template",  # 2.14
        "--print-completion",  # 2.14
    }
)
"""Options that came after the oldest torch that ftrun works with."""
