"""What fetches the batches of one loop: the training process itself, or torch's workers under supervision.

Workers are replaced once in each loop when one dies, from the position that is known. A worker's death is looked for
while a batch is waited for. Torch alone would raise it in whatever line of the training loop runs at that moment.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.utils.data._utils.signal_handling
from torch.autograd import profiler

from ftrun.data.cautions import MORE_MEMORY, shared_memory_free, too_little_shared_memory
from ftrun.data.worker_death import Watch, deaths, shared_memory_use, what_they_do

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess

    from ftrun.data.worker_death import Death

_log = logging.getLogger(__name__)

# Torch's register of the processes whose death is raised in the main thread.
_register: Any = torch.utils.data._utils.signal_handling

# Seconds from a broken connection to the news that a worker has died.
_LAST_WORDS = 0.5
_KILL_SECONDS = 5.0


class Direct(Iterator[Any]):
    """Fetches in the training process.

    Args:
        fetch: one batch for one ticket.
        tickets: of this loop.
    """

    def __init__(self, fetch: Callable[[Any], Any], tickets: Iterator[Any]) -> None:
        self._fetch = fetch
        self._tickets = tickets

    def __next__(self) -> Any:
        if profiler._is_profiler_enabled:
            with profiler.record_function("enumerate(DataLoader)#ftrun.__next__"):
                return self._fetch(next(self._tickets))
        return self._fetch(next(self._tickets))


class Crew:
    """The workers of one loader, from loop to loop. Refers to nothing that refers to it: see :func:`demolish`.

    Args:
        batches: how many batches its workers may have ready at a time.
        persistent: whether workers stay from loop to loop.
    """

    def __init__(self, *, batches: int, persistent: bool) -> None:
        self._persistent = persistent
        self._loader: torch.utils.data.DataLoader[Any] | None = None
        self._batches = batches
        self._free: int | None = None
        self._measured = False
        self.watch = Watch()

    def begin(self, make: Callable[[], torch.utils.data.DataLoader[Any]], seed: int) -> Any:
        """Torch's iterator for a loop; its workers begin where the tickets do.

        Args:
            make: a torch loader over the tickets that are due, with new workers.
            seed: of the workers' own random streams.
        """
        kept = self._loader
        if kept is not None and (not self._persistent or deaths(workers_of(kept._iterator))):
            self.disband(kept._iterator)
        try:
            return self._started(make, seed)
        except Exception:
            lost = deaths(workers_of(kept._iterator)) if kept is not None else []
            if kept is None or self._loader is not kept or not lost:
                raise
            _log.warning("ftrun: loader workers died between two loops and are replaced: %s", self.watch.story(lost))
            self.disband(kept._iterator)
            return self._started(make, seed)

    def _started(self, make: Callable[[], torch.utils.data.DataLoader[Any]], seed: int) -> Any:
        if self._loader is None:
            self._free = shared_memory_free()
            self._loader = make()
        assert self._loader.generator is not None
        self._loader.generator.manual_seed(seed)
        with attention(self._loader._iterator):
            iterator = iter(self._loader)
        unattended(iterator)
        return iterator

    def disband(self, iterator: Any) -> None:
        """End all workers of an iterator now, whatever they are doing; the next loop gets new ones."""
        self._loader = None
        if iterator is not None:
            demolish(iterator)

    def measure(self, batch: Any) -> None:
        """Warn, once, where shared memory is too small for batches like this one."""
        if self._measured:
            return
        self._measured = True
        caution = too_little_shared_memory(batch, self._batches, self._free)
        if caution:
            warnings.warn(f"ftrun: {caution}", stacklevel=5)  # the line of the loop


class Supervised(Iterator[Any]):
    """One loop's batches from workers. Nothing else refers to it, so leaving the loop ends workers that don't stay.

    Args:
        crew: the loader's workers.
        make: see :meth:`Crew.begin`.
        seed: of the workers' own random streams.
        rewind: makes the next tickets those after the last batch that was yielded.
    """

    def __init__(
        self, crew: Crew, make: Callable[[], torch.utils.data.DataLoader[Any]], seed: int, rewind: Callable[[], None]
    ) -> None:
        self._crew = crew
        self._make = make
        self._seed = seed
        self._rewind = rewind
        self._replaced = False
        self._iterator = crew.begin(make, seed)

    def __next__(self) -> Any:
        while True:
            try:
                with attention(self._iterator):
                    batch = next(self._iterator)
            except StopIteration:
                raise
            except Exception as error:
                self._replace_or_raise(error)
            else:
                self._crew.watch.look(workers_of(self._iterator))
                self._crew.measure(batch)
                return batch

    def _replace_or_raise(self, error: Exception) -> None:
        workers = workers_of(self._iterator)
        # A worker's death may show first as a broken connection.
        broken = isinstance(error, OSError | EOFError)
        dead = deaths(workers, within=_LAST_WORDS if broken else 0.0)
        if not dead:
            if "timed out" in str(error):
                error.add_note(f"ftrun: {what_they_do(workers)}")
            if "shared memory" in str(error):
                where = "batches on their way from workers lie in shared memory"
                error.add_note(f"ftrun: {where}; {shared_memory_use()}. {MORE_MEMORY}")
            self._crew.disband(self._iterator)
            raise error
        story = self._crew.watch.story(dead)
        self._crew.disband(self._iterator)
        if self._replaced:
            raise _as_torch_says_it(error, dead, f"ftrun: for the second time in this loop {story}")
        self._replaced = True
        _log.warning("ftrun: %s. The loader's workers are replaced, once, and go on at the same position.", story)
        self._rewind()
        self._iterator = self._crew.begin(self._make, self._seed)


def _as_torch_says_it(error: Exception, dead: Sequence[Death], note: str) -> Exception:
    if not isinstance(error, RuntimeError):
        pids = ", ".join(str(death.pid) for death in dead)
        cause, error = error, RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly")
        error.__cause__ = cause
    error.add_note(note)
    return error


def workers_of(iterator: Any) -> list[BaseProcess]:
    """The worker processes behind torch's iterator, by number."""
    return list(getattr(iterator, "_workers", ()))


@contextlib.contextmanager
def attention(iterator: Any) -> Iterator[None]:
    """Let a worker's death end the wait in this block, even in the middle of a message that will never be complete.

    Raises:
        RuntimeError: a worker has died, before or during the block.
    """
    if iterator is None or not hasattr(iterator, "_worker_pids_set"):
        yield
        return
    _register._set_worker_pids(id(iterator), tuple(each.pid for each in workers_of(iterator)))
    iterator._worker_pids_set = True
    try:
        _register._error_if_any_worker_fails()
        yield
    finally:
        unattended(iterator)


def unattended(iterator: Any) -> None:
    """Let no worker's death be raised from here on, until :func:`attention` says otherwise."""
    if getattr(iterator, "_worker_pids_set", False):
        _register._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def demolish(iterator: Any) -> None:
    """Kill the workers of torch's iterator.

    Its own way to end them waits for those that are stuck or stopped, and 5 s for each when the garbage collector
    gets there first.
    """
    unattended(iterator)
    workers = workers_of(iterator)
    if not workers:
        return
    iterator._shutdown = True
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(_KILL_SECONDS)
    done = getattr(iterator, "_pin_memory_thread_done_event", None)
    if done is not None:
        done.set()
    for queue in iterator._index_queues:
        queue.cancel_join_thread()
        queue.close()
