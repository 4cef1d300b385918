"""``ftrun config``: look at a job file without running it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ftrun.contract import ExitCode
from ftrun.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftrun.config.job import LaunchValue
    from ftrun.config.load import JobFile

app = typer.Typer(help="Check a job file, show what it means, print its schema.", no_args_is_help=True)

# A value longer than this pushes its origin to the right instead of every other line's.
_WIDEST_VALUE = 40

File = Annotated[str, typer.Argument(metavar="FILE", help="The job file.", show_default=False)]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Set a value on top of the file; repeatable.", show_default=False),
]


@app.command()
def check(file: File, sets: Sets = None) -> None:
    """Say ok, or list everything that is wrong and exit with 2."""
    _load(file, sets)
    typer.echo("ok")


@app.command()
def show(
    file: File,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print every effective value and where it came from."""
    from ftrun.config.load import to_json

    job = _load(file, sets)
    typer.echo(json.dumps(to_json(job), indent=2, ensure_ascii=False) if as_json else table(job))


@app.command()
def schema() -> None:
    """Print the JSON schema of the job file, for editors."""
    from ftrun.config.schema import schema_text

    typer.echo(schema_text(), nl=False)


def table(job: JobFile) -> str:
    """One aligned line for each value: ``checkpoint.every = 10m   (job.yaml:6)``."""
    rows = [(setting.name, plain(setting.value), setting.origin) for setting in job.settings()]
    names = max(len(name) for name, _, _ in rows)
    wide = max((len(value) for _, value, _ in rows if len(value) <= _WIDEST_VALUE), default=0)
    return "\n".join(f"{name:<{names}} = {value:<{wide}}   ({origin})" for name, value, origin in rows)


def plain(value: object) -> str:
    """A value as it would stand in YAML, with quotes only where a reader would miss them."""
    if isinstance(value, str):
        return (
            value if value and value.isprintable() and value == value.strip() else json.dumps(value, ensure_ascii=False)
        )
    if isinstance(value, list):
        return f"[{', '.join(plain(item) for item in value)}]"
    return json.dumps(value)


def _load(file: str, sets: list[str] | None) -> JobFile:
    from ftrun.config.load import load_job

    try:
        return load_job(file, sets or (), _check_launch)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(ExitCode.USAGE) from None


def _check_launch(options: Mapping[str, LaunchValue]) -> Mapping[str, str]:
    """What torchrun's parser has against the options under ``launch``. Imports torch, where there are any."""
    if not options:
        return {}
    from ftrun.config.origins import Resolved
    from ftrun.launch import nodes_choice, plan
    from ftrun.launch.options import LaunchParser

    parser = LaunchParser()
    problems = plan.check_launch(parser, options)
    if problems or options.keys().isdisjoint(("rdzv_endpoint", "rdzv_conf")):
        return problems
    known = {name: Resolved(value, "default") for name, value in parser.defaults().items()}
    given = {name: Resolved(value, "job file") for name, value in options.items()}
    return nodes_choice.unusable(known | given)
