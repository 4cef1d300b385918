"""A training job over data that is read in order: each rank writes down what it trained on at each step.

It makes no more steps than a file ``hold`` beside that says, for as long as there is one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

import ftrun

sys.path.insert(0, str(Path(__file__).parent.parent))

from iterable_kit import Sharded, Stream, Whole, WithState, as_list


def loader_of(ft: ftrun.Session, options: argparse.Namespace) -> Any:
    if options.kind == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader: Any = StatefulDataLoader(Numbers(ft.rank), batch_size=4, num_workers=options.workers)
        ft.track(loader=loader)
        return loader
    datasets = {
        "state": lambda: Sharded(WithState),
        "state, known": lambda: Sharded(WithState, [200] * 16, known=True),
        "skipping": lambda: Sharded(Stream, [200] * 16, known=True),
        "whole": lambda: Whole(ft.rank),
    }
    arguments = {"virtual_shards": 16} if options.kind != "whole" else {}
    dataset: Any = datasets[options.kind]()
    return ft.loader(
        dataset,
        global_batch=24,
        shuffle=options.kind != "whole",
        collate_fn=as_list,
        num_workers=options.workers,
        **arguments,
    )


def held_at(hold: Path, never: int) -> int:
    try:
        return int(hold.read_text())
    except FileNotFoundError:
        return never


class Numbers(torch.utils.data.IterableDataset[int]):
    """Like those that users split by hand."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def __iter__(self) -> Any:
        while self.at < 1000:
            self.at += 1
            yield 1000 * self.rank + self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@ftrun.entrypoint(every=5)
def main(ft: ftrun.Session, options: argparse.Namespace) -> None:
    model = torch.nn.Linear(4, 1)
    ft.track(model=model)
    loader = loader_of(ft, options)
    with (options.out / f"rows-{ft.rank}.txt").open("a") as out:
        for batch in ft.steps(loader, total=options.total):
            if ft.step == options.leave_at:
                break
            rows = batch.tolist() if isinstance(batch, torch.Tensor) else batch
            out.write(f"{ft.step}\t{ft.world_size}\t{rows!r}\n")
            out.flush()
            time.sleep(options.pace)
            while ft.step >= held_at(options.out / "hold", options.total):
                time.sleep(0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--total", type=int, default=60)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.02)
    parser.add_argument("--leave-at", type=int, default=-1)
    parser.add_argument("--kind", default="state")
    parser.add_argument("--out", type=Path, default=Path())
    main(parser.parse_args())
