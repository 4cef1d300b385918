"""``ftrun run``: understand the command line, then carry it out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer  # noqa: TC002 - typer reads the annotation when the command is called

from ftrun.errors import FtrunError, RunDirTaken

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.launch.plan import LaunchPlan
    from ftrun.launch.standbys.standby import Standbys

_NAMES = 20
"""How many names a run without one of its own tries."""


def run(ctx: typer.Context) -> None:
    """Run a training script on this node; the default command. `ftrun run --help` lists all options."""
    from ftrun.cli.app import fail
    from ftrun.launch import options, plan
    from ftrun.launch.standbys.standby import Standbys

    try:
        parser = options.LaunchParser()
        line = parser.parse(ctx.args)

        def make() -> LaunchPlan:
            return plan.make(line, parser, os.environ, cwd=Path.cwd())

        made = make()
        if line.dry_run:
            _show(made, as_json=line.json)
            return
        with ctx.obj or Standbys() as standbys:
            code = _carry_out(made, make, standbys)
    except FtrunError as error:
        fail(error)
        return
    raise SystemExit(code)


def _carry_out(made: LaunchPlan, again: Callable[[], LaunchPlan], standbys: Standbys) -> int:
    """Execute a plan; a run that takes any free name gets another one where somebody else was faster."""
    from ftrun.launch.execute import execute

    for _ in range(_NAMES):
        try:
            return execute(made, sys.argv, standbys)
        except RunDirTaken:
            if not made.takes_a_free_name:
                raise
            made = again()
    return execute(made, sys.argv, standbys)


def _show(made: LaunchPlan, *, as_json: bool) -> None:
    from ftrun.cli.config import plain

    document = made.to_json()
    if as_json:
        print(json.dumps(document, indent=1))
        return
    print(f"script      {' '.join([made.script, *made.script_args])}")
    print(f"run         {made.run_id} ({document['state']}) in {made.run_dir.path}")
    print(f"checkpoints {made.root}")
    finished = made.finished and not made.contract.allow_new_total
    print(f"resume      {'nothing: it is finished' if finished else made.resume or 'nothing: a fresh start'}")
    for name, resolved in made.launch.items():
        if resolved.origin != "default":
            print(f"launch.{name} = {resolved.value}   ({resolved.origin})")
    for setting in made.job.settings():
        if setting.origin != "default" and setting.path[0] != "launch":
            print(f"{setting.name} = {plain(setting.value)}   ({setting.origin})")
