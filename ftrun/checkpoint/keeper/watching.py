"""A keeper whose launcher has no loop of its own to look after it: a thread does."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from ftrun.checkpoint.keeper.config import KeeperConfig
from ftrun.checkpoint.keeper.process import Keeper
from ftrun.checkpoint.storage.base import why
from ftrun.errors import CheckpointError

if TYPE_CHECKING:
    from ftrun.checkpoint.epochs import EpochRecord
    from ftrun.checkpoint.memory.tier import Tier

_log = logging.getLogger(__name__)

_WATCH_SECONDS = 0.2


class WatchedKeeper:
    """The keeper of a node, started as soon as there is a memory tier, and again whenever it has died.

    Any thread may call it. A daemon thread of this process watches from the first :meth:`begin` to :meth:`finish`.

    Args:
        tier: the node's memory tier; workers make it.
        config: what the keeper is told.

    Attributes:
        tier: the node's memory tier.
    """

    def __init__(self, tier: Tier, config: KeeperConfig) -> None:
        self.tier = tier
        self._keeper = Keeper(tier, config)
        self._record: EpochRecord | None = None
        self._trouble = ""
        self._busy = threading.Lock()
        self._over = threading.Event()
        self._watchman: threading.Thread | None = None

    def claim(self) -> None:
        """What an earlier life's workers have left in memory is this one's.

        Raises:
            CheckpointError: somebody holds the directory above for too long.
            OSError: the tier can't be written.
        """
        if self.tier.path.is_dir():
            with self._busy:
                self._keeper.claim()

    def begin(self, record: EpochRecord) -> None:
        """An attempt begins with this epoch. Where there is a tier the keeper runs when this returns, or will soon."""
        with self._busy:
            self._record = record
        self._look()
        if self._watchman is None:
            self._watchman = threading.Thread(target=self._watch, name="ftrun-keeper", daemon=True)
            self._watchman.start()

    def _watch(self) -> None:
        while not self._over.wait(_WATCH_SECONDS):
            self._look()

    def _look(self) -> None:
        with self._busy:
            if not self.tier.path.is_dir():
                return
            try:
                if self._record is not None:
                    self._keeper.begin_epoch(self._record)
                    self._record = None
            except (OSError, CheckpointError) as error:
                self._warn(error)
                return
            self._keeper.ensure()

    def _warn(self, error: OSError) -> None:
        """Say once what is in the way; the next look tries again."""
        if why(error) != self._trouble:
            self._trouble = why(error)
            _log.warning("ftrun: the memory for snapshots, %s, can't be used: %s", self.tier.path, self._trouble)

    def finish(self, seconds: float) -> bool:
        """Have what is sealed committed, and end the keeper. Workers must have ended.

        Args:
            seconds: how long that may take.

        Returns:
            Whether all of it is committed. If not the tier stays: the next start takes it up.
        """
        self._over.set()
        if self._watchman is not None:
            self._watchman.join(seconds)
        if not self.tier.path.is_dir():
            return True
        done = self._keeper.finish(seconds)
        if done and KeeperConfig.read(self.tier) is None:  # nobody's: its workers ended before the first look
            self.tier.remove()
        return done
