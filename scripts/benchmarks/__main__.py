"""Measure ftrun, side by side with its peers, on this machine.

    scripts/bench recovery|checkpoint|data|nodes|detect|all [--quick] [--json FILE]

Every figure is a ratio or a count from one run, the median of at least ten measurements (fewer with --quick), with the
same thing measured twice beside it as a control. Close everything else: a busy machine shows in the control.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import checkpoint
import data
import detect
import nodes
import recovery
from common import Settings, say, work_directory
from figures import table, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from figures import Figure

# A further subject (goodput) is a module with such a function, and a line here.
SUBJECTS: dict[str, Callable[[Settings], Iterator[Figure]]] = {
    "recovery": recovery.measure,
    "checkpoint": checkpoint.measure,
    "data": data.measure,
    "nodes": nodes.measure,
    "detect": detect.measure,
}


def main() -> int:
    options = _options()
    # As Ctrl-C does: what was started is ended and tidied up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = list(SUBJECTS) if options.subject == "all" else [options.subject]
    figures: list[Figure] = []
    with work_directory(options.keep) as work:
        settings = Settings(options.quick, work, options.seed, frozenset(options.only))
        try:
            for name in chosen:
                for figure in SUBJECTS[name](settings):
                    say(f"{figure.id}: {figure.verdict}")
                    figures.append(figure)
        finally:
            # What was measured before a Ctrl-C is shown too.
            print(table(figures))
            if options.json is not None:
                options.json.write_text(to_json(figures))
    return 0 if all(figure.verdict == "met" for figure in figures) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subject", choices=[*SUBJECTS, "all"])
    parser.add_argument("--quick", action="store_true", help="fewer measurements: a look, not a result")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="only these figures: recovery.help ...")
    parser.add_argument("--seed", type=int, default=17, help="of every random choice")
    parser.add_argument("--keep", action="store_true", help="keep what the jobs wrote")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
