"""Finds out which random generators a dataset's samples depend on, so that no others are seeded for them.

Seeding all three takes 6 µs a sample, several times as long as reading one from memory. So while samples are quick,
the first few are read once more, with other seeds in the generators that haven't moved for any sample yet. Where that
changes nothing, those are no longer seeded but watched: their states are compared after each batch. When one has moved
after all, that batch is read again, with all of them seeded, and so is everything from there on.

What is watched this way is seen: a draw, or a seed set, in any sample. What is not: a sample that depends on the state
of a generator and leaves it as it was (``torch.initial_seed()``, ``random.getstate()``), unless it is among those
read twice.

A dataset that holds a generator or an iterator of its own is not tried: reading it twice would change what comes next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftrun.data.frozen import frozen
from ftrun.data.generators import generators, states
from ftrun.data.own_state import has_own_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftrun.data.generators import Generator

# Samples that are read twice.
_SAMPLES = 16
# Seconds: seeding doesn't count beside samples that take longer, and reading them twice would.
_QUICK = 0.002
# What tells the other seeds from the right ones: any bits, the last of each half among them.
_OTHERWISE = 0xEECE66D5_DEECE66D


class Trial:
    """Of the dataset of one loader, in one process.

    Attributes:
        seeded: generators that have to be seeded for each sample: at first all of them.
        watched: the others, which no sample has moved, with their places among all.
        whole: whether ``__getitems__`` gives the same samples as ``__getitem__``, and no generator is seeded.
    """

    def __init__(self) -> None:
        self.seeded = generators()
        self.watched: tuple[tuple[int, Generator], ...] = ()
        self.whole = False
        self._drawn: list[Generator] = []
        self._left = _SAMPLES
        self._others: list[Any] = []  # of this batch's samples, what they were with other seeds
        self._quick = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be found out."""
        return not self._left

    @property
    def is_due(self) -> bool:
        """Whether the samples of the next batch are to be read twice."""
        return self._quick and not self.is_over

    def took(self, dataset: Any, seconds: float) -> None:
        """Hear how long a sample took, on the average of a batch.

        Until one is quick, however late that is: a whole first epoch may have to wait for its files.
        """
        self._quick = seconds < _QUICK
        # Looked at now: it may have made a generator with its first sample.
        if self._quick and has_own_state(dataset):
            self.give_up()

    def begin(self) -> None:
        """Forget what was read for a batch that failed, or was broken off."""
        self._others = []

    def read(self, dataset: Any, index: int, bits: int) -> None:
        """Read a sample, before it is read properly, with its seeds in none but those generators that have moved."""
        if len(self._others) == self._left:
            return
        try:
            self._others.append(self._read(dataset, index, bits))
        except Exception:  # with its own seeds it may do well; and if not, it is then that it is to be said
            self.give_up()

    def _read(self, dataset: Any, index: int, bits: int) -> Any:
        while True:
            before = self._seed_otherwise(bits)
            sample = frozen(dataset[index])
            moved = [each for each, state in before if each not in self._drawn and each.state() != state]
            if not moved:
                return sample
            self._drawn += moved

    def _seed_otherwise(self, bits: int) -> list[tuple[Generator, Any]]:
        for each in generators():
            if each in self._drawn:
                each.seed(bits)
            else:
                each.unsettle(bits ^ _OTHERWISE)
        return [(each, each.state()) for each in generators()]

    def compare(self, dataset: Any, indices: Sequence[int], samples: Sequence[Any]) -> None:
        """Compare the samples of a batch, which were read properly, with those that :meth:`read` has read."""
        others, self._others = self._others, []
        try:
            same = [frozen(each) for each in samples[: len(others)]] == others
        except Exception:  # a kind of sample that can't be compared
            same = False
        if not same:
            self.give_up()
            return
        self._left = max(0, self._left - len(others))  # it may have been given up before
        if not self._left and others:
            self.seeded = tuple(each for each in generators() if each in self._drawn)
            self.watched = tuple(pair for pair in enumerate(generators()) if pair[1] not in self._drawn)
            self.whole = not self.seeded and self._same_together(dataset, indices[: len(others)], others)

    def _same_together(self, dataset: Any, indices: Sequence[int], samples: Sequence[Any]) -> bool:
        if not getattr(dataset, "__getitems__", None):
            return False
        before = states()
        try:
            return [frozen(each) for each in dataset.__getitems__(indices)] == samples and states() == before
        except Exception:  # they are read one by one then
            return False

    def noticed(self, before: Sequence[Any]) -> bool:
        """See whether a watched generator has moved. If so, all are seeded from here on.

        Args:
            before: states of all generators before.
        """
        for place, each in self.watched:
            if each.state() != before[place]:
                self.give_up()
                return True
        return False

    def give_up(self) -> None:
        """Seed all generators from here on."""
        self.seeded, self.watched, self.whole = generators(), (), False
        self._left, self._others = 0, []
