"""``@ftrun.entrypoint``: a function that gets a Session."""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from ftrun.contract import WorkerContract
from ftrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftrun.session.session import Session

    P = ParamSpec("P")
    R = TypeVar("R")


@overload
def entrypoint(function: Callable[..., R], /) -> Callable[..., R]: ...


@overload
def entrypoint(
    *, every: int | None = ..., process_group: bool = ...
) -> Callable[[Callable[..., R]], Callable[..., R]]: ...


def entrypoint(
    function: Callable[..., Any] | None = None, /, *, every: int | None = None, process_group: bool = True
) -> Any:
    """Make a function the entry point of a training script: it is called with a :class:`Session` as first argument.

    ::

        @ftrun.entrypoint
        def main(ft: ftrun.Session) -> None: ...

        if __name__ == "__main__":
            main()

    Works the same under ``ftrun``, plain ``torchrun`` and plain ``python``. Outside ftrun a mistake of the user's is
    shown as one message, without a traceback, and ends the process with code 2.

    Args:
        function: the function.
        every: steps between checkpoints, where the job doesn't say; 10 minutes otherwise.
        process_group: make the default process group where the script has not, and take it down at the end. With
            False the script calls ``init_process_group`` itself.
    """
    if function is None:
        return lambda wrapped: _wrap(wrapped, every, process_group)
    return _wrap(function, every, process_group)


def _wrap(function: Callable[..., Any], every: int | None, process_group: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def main(*arguments: Any, **named: Any) -> Any:
        from ftrun.session.session import Session

        try:
            with Session.open(every=every, process_group=process_group) as session:
                return _call(function, session, arguments, named)
        except UsageError as error:
            contract = WorkerContract.from_environment(os.environ)
            if contract is not None and not contract.alone:
                raise  # the launcher shows it, once for all ranks
            print(f"ftrun: {error}", file=sys.stderr)
            raise SystemExit(2) from None

    return main


def _call(function: Callable[..., Any], session: Session, arguments: Any, named: Any) -> Any:
    return function(session, *arguments, **named)
