"""The command line: ``run`` is the default command, the others are subcommands. Imports no torch.

Everything that is not a command goes to ``run``, whose arguments torch's own parser reads.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from ftrun.errors import ConfigError, FtrunError, UsageError

_OWN_FLAGS = ("--help", "--version", "--install-completion", "--show-completion")


class DefaultRun(TyperGroup):
    """Takes what is no command as arguments of ``run``, unless it looks like a misspelt command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put ``run`` in front where the user left it out."""
        if args and args[0] not in self.commands and args[0] not in _OWN_FLAGS:
            self._refuse_misspelt(args[0])
            args = ["run", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def _refuse_misspelt(self, word: str) -> None:
        if word.startswith("-") or "." in word or "/" in word or Path(word).exists():
            return
        close = difflib.get_close_matches(word, self.commands, n=1, cutoff=0.7)
        if close:
            fail(
                ConfigError(
                    [
                        f"ftrun: there is no command {word!r}; did you mean `ftrun {close[0]}`?",
                        f"To run a script of that name: ftrun run {word}",
                    ]
                )
            )


app = typer.Typer(cls=DefaultRun, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def fail(error: FtrunError) -> None:
    """Show an error of the user's and leave."""
    sys.stdout.flush()
    for line in str(error).splitlines():
        print(line if line.startswith("ftrun") else f"ftrun: {line}", file=sys.stderr)
    raise SystemExit(2 if isinstance(error, UsageError) else 1)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        print(f"ftrun {metadata.version('ftrun')}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Launch PyTorch training as torchrun does, and resume from the latest committed checkpoint after a fault.

    `ftrun --nproc 2 train.py --lr 3e-4` runs a script on two processes. `ftrun -c job.yaml` runs a job; a named one
    continues where it stopped. `ftrun status` says how the latest run is doing.

    `ftrun run --help` lists the launch options. Exit codes: 0 done, 2 usage, 75 stopped with a commit (run it again),
    76 gave up, 86 this node was excluded, 128+n signal n, otherwise the code of the worker that failed first.
    """


def main_commands() -> None:
    """Register the commands; each lives in a file of its own."""
    from ftrun.cli import cache, ckpt, config, nodes, run, status

    app.command(
        "run",
        add_help_option=False,
        context_settings={
            "ignore_unknown_options": True,
            "allow_extra_args": True,
            "allow_interspersed_args": False,
        },
    )(run.run)
    app.command("status")(status.status)
    app.add_typer(ckpt.app, name="ckpt")
    app.add_typer(nodes.app, name="nodes")
    app.add_typer(cache.app, name="cache")
    app.add_typer(config.app, name="config")


main_commands()
