"""What a loader of this node reads, in JSON: everything that a process without it needs to fetch ahead of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ftrun.data.filler.places import read_json
from ftrun.data.filler.shards import ShardFiles
from ftrun.data.order import SAMPLER
from ftrun.data.position import Position, Recipe

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VERSION = 1


@dataclass(frozen=True)
class FillPlan:
    """One loader's plan on one node.

    Attributes:
        loader: its name in the checkpoint.
        attempt: the run's attempt that registered it.
        recipe: of the order.
        world_size: ranks that share each global batch.
        ranks: those of this node.
        position: where the attempt began.
        urls: digest of the list of URLs: by dataset index, or shard by shard.
        files: what :meth:`ftrun.data.cache.files.CachedFiles.from_spec` takes.
        written: the order is written in files beside the plan.
        shards: of a dataset in shards; None for one that is read by index.
    """

    loader: str
    attempt: int
    recipe: Recipe
    world_size: int
    ranks: tuple[int, ...]
    position: Position
    urls: str
    files: dict[str, Any]
    written: bool = False
    shards: ShardFiles | None = None

    @property
    def needed_urls(self) -> int:
        """How many URLs the list must have at least."""
        if self.shards is not None:
            return sum(self.shards.files)
        return 0 if self.recipe.n is None or self.recipe.order == SAMPLER else self.recipe.n

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"v": VERSION, **asdict(self), "position": list(self.position), "recipe": asdict(self.recipe)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> FillPlan | None:
        """Back; None where it is no plan of this version."""
        if document.get("v") != VERSION:
            return None
        fields = {name: value for name, value in document.items() if name != "v"}
        try:
            recipe, position = Recipe(**fields.pop("recipe")), Position(*map(int, fields.pop("position")))
            ranks = tuple(map(int, fields.pop("ranks")))
            shards = fields.pop("shards", None)
            if shards is not None:
                files, lengths = shards["files"], shards["lengths"]
                shards = ShardFiles(tuple(map(int, files)), None if lengths is None else tuple(map(int, lengths)))
            return cls(recipe=recipe, position=position, ranks=ranks, shards=shards, **fields)
        except (TypeError, ValueError, KeyError):
            return None

    @classmethod
    def read(cls, path: Path) -> FillPlan | None:
        """A plan's file; None where it can't be read."""
        document = read_json(path)
        return None if document is None else cls.from_json(document)


@dataclass(frozen=True)
class Resume:
    """What the launcher says of the attempt that is starting.

    Attributes:
        attempt: its number.
        world_size: ranks in all.
        ranks: those of this node.
        loaders: states of the loaders in the checkpoint that it resumes from; empty for a fresh start.
    """

    attempt: int
    world_size: int
    ranks: tuple[int, ...]
    loaders: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Resume | None:
        """The file; None where it can't be read."""
        document = read_json(path)
        try:
            return None if document is None else cls(**{**document, "ranks": tuple(document["ranks"])})
        except (TypeError, KeyError):
            return None


def resumed(plan: FillPlan, resume: Resume | None) -> FillPlan:
    """A plan of an earlier attempt, as that attempt will read that is starting: elsewhere, and by other ranks.

    A position of other data is none: the plan stays as it is, and its loader will say what is wrong.
    """
    if resume is None or resume.attempt <= plan.attempt:
        return plan
    changed = replace(plan, attempt=resume.attempt, world_size=resume.world_size, ranks=resume.ranks)
    if not resume.loaders:
        return replace(changed, position=Position())
    state = resume.loaders.get(plan.loader)
    if not isinstance(state, dict):
        return plan
    mine = asdict(plan.recipe)
    epoch, samples, size = state.get("epoch"), state.get("samples"), state.get("global_batch")
    fits = all(state.get(name) == mine[name] for name in ("n", "dataset", "order", "seed", "tail"))
    if not (fits and isinstance(epoch, int) and isinstance(samples, int) and isinstance(size, int) and size > 0):
        return plan
    return replace(changed, recipe=replace(plan.recipe, global_batch=size), position=Position(epoch, samples))
