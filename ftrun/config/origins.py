"""Which value wins, and where it came from. One function states the order of precedence: :func:`merge`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Resolved:
    """A value and where it came from.

    Attributes:
        value: the value, unconverted: the environment's are text.
        origin: ``command line``, ``--set``, ``environment PET_NNODES``, ``job.yaml:6`` or ``default``.
    """

    value: object
    origin: str


def from_environment(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, Resolved]:
    """The options that the environment gives.

    Args:
        environ: the process environment, read once at the edge.
        variables: the variable of each option, such as ``{"nnodes": "PET_NNODES"}``.

    Returns:
        Options whose variable is set. As for torchrun, a variable that is set to nothing is set.
    """
    present = {name: variable for name, variable in variables.items() if variable in environ}
    return {name: Resolved(environ[variable], f"environment {variable}") for name, variable in present.items()}


def merge(
    command_line: Mapping[str, object],
    environment: Mapping[str, Resolved],
    job: Mapping[str, Resolved],
    defaults: Mapping[str, object],
) -> dict[str, Resolved]:
    """Command line > ``--set`` > environment > job file > default.

    Args:
        command_line: options that were typed, and only those.
        environment: options from variables; see :func:`from_environment`.
        job: options under ``launch``; see ``JobFile.launch_options``. Those that came by ``--set`` were typed
            on the command line too, so they win over the environment.
        defaults: every option that exists, with its default.

    Returns:
        Every option of any layer, in the order of ``defaults`` and then as they come.
    """
    typed = {name: given for name, given in job.items() if given.origin == "--set"}
    return {
        **{name: Resolved(value, "default") for name, value in defaults.items()},
        **job,
        **environment,
        **typed,
        **{name: Resolved(value, "command line") for name, value in command_line.items()},
    }
