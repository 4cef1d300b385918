"""What workers write: always to a log file per rank and attempt, and to the console as under torchrun.

Every stream of a worker runs through the launcher: one thread reads what all of them write and carries it to the log
files at once and to the console (``output_pump``). The ways that were weighed against it, measured on two cores:

- *Workers write into their log files, and the launcher follows these.* Nothing is lost if the launcher is killed. But
  nobody asked for the log file, and when its disk is full a worker's ``print`` raises and training dies of it. And a
  stream in a file is no terminal. Here a full disk leaves a gap in the log, which says so, and training goes on.
- *Cost*, as parts of a core. Eight ranks that write nothing: 0.05 % (the thread sleeps until something comes; torch's
  threads, which look at each file ten times a second, take 0.5 %). Two ranks with 10,000 lines a second each: 2.4 %,
  and 4 % on a terminal (following files: 0.7 %), because the thread rests for 10 ms after each round and then takes
  what has gathered. A line that comes alone is shown at once; following files it waits for up to 100 ms.
- *The price*. A launcher that is stopped holds up workers once 256 KiB are waiting, and one that is killed with -9
  takes up to 10 ms of their last words with it; its workers die with it in any case.

What a worker finds is what the launcher has: a terminal (of the same size) where the launcher writes to one, so that
progress bars and prompts are there at once; a pipe otherwise. Where the launcher's two streams are one terminal, pipe
or file, the order between them can be seen, and a progress bar on one depends on what is written to the other: then
the worker's two are one as well, and ``stdout.log`` and ``stderr.log`` two names of one transcript. Standard input is
not touched: workers have the launcher's, and nobody passes keys on to the terminals made here.

With a single rank on the console bytes are shown as they come. With several, whole lines, or what stands for 0.2 s, so
that ranks don't mix within a line. Nobody ever waits for the console (``output_console``).

Streams that torchrun's options send to files go there, and the run directory has a further name of each file; what
``--tee`` shows has torch's prefixes, and the duplicate filters have their files.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from ftrun.launch.output import routes as output_routes
from ftrun.launch.output import source as output_source
from ftrun.launch.output.files import LogFile, keep, name_also
from ftrun.launch.output.lines import AsWritten, Prefixed, View, WholeLines
from ftrun.launch.output.pump import Pump, Stream
from ftrun.launch.output.routes import ERR, OUT, Route, Tee

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.elastic.multiprocessing import LogsDest

    from ftrun.launch.output.outlets import Outlets
    from ftrun.launch.output.source import Source

_PATIENCE = 5.0
"""Seconds. It takes as long only where the logs' storage doesn't answer, or the thread gets no processor."""


class Output:
    """The output of one attempt's workers on this node. Main thread only.

    ``open()`` for each rank, start the workers, ``start()``; ``settle()`` before somebody reads the log files or
    speaks on the console; ``close()`` when the workers have ended. What is on its way to the console then is shown
    before whatever is put into the same outlets later, and nobody waits for it.

    Args:
        destination: files, and what is shown, from ``RunLogs.reify``.
        directories: the own directory of each local rank.
        tee: how torch's ``--tee`` shows lines.
        outlets: the launcher's own streams, which outlive this.
    """

    def __init__(
        self,
        destination: LogsDest,
        directories: Mapping[int, Path],
        tee: Tee,
        outlets: Outlets,
    ) -> None:
        self.routes = output_routes.settle(destination, directories, tee, outlets.launcher)
        self._directories = directories
        self._outlets = outlets
        shown = {rank for rank, routes in self.routes.items() for route in routes if route.outlet}
        self._alone = len(shown) == 1
        self._filtered = self._open_filtered(destination, tee)
        self._streams: list[Stream] = []
        self._pump: Pump | None = None
        self._closed = False

    def _open_filtered(self, destination: LogsDest, tee: Tee) -> dict[str, LogFile]:
        wanted = {OUT: (output_routes.filtered(destination, OUT), tee.stdout_filters)}
        wanted[ERR] = (output_routes.filtered(destination, ERR), tee.stderr_filters)
        return {stream: LogFile(Path(path), self._outlets.say) for stream, (path, needles) in wanted.items() if needles}

    def open(self, local_rank: int) -> tuple[int | None, int | None]:
        """Descriptors for a worker's standard output and standard error; this object keeps and closes them.

        None, where not even a pipe can be made, leaves the worker the launcher's own stream.
        """
        ends: dict[str, int] = {}
        for route in self.routes[local_rank]:
            try:
                source = self._source(route)
            except OSError as error:
                self._outlets.say(f"rank {local_rank} has no log file: {error.strerror}.")
                continue
            self._streams.append(self._stream(source, route))
            ends |= dict.fromkeys(route.streams, source.writer)
        return ends.get(OUT), ends.get(ERR)

    def _source(self, route: Route) -> Source:
        outlet = self._outlets.get(route.outlet)
        if route.terminal and outlet is not None:
            with contextlib.suppress(OSError):  # no more terminals: a pipe does for all but looks
                return output_source.terminal(outlet.fd)
        return output_source.pipe()

    def _stream(self, source: Source, route: Route) -> Stream:
        log = LogFile(route.file, self._outlets.say)
        for link in route.links:
            name_also(route.file, link)
        filtered = self._filtered.get(route.streams[0]) if route.filters else None
        return Stream(source, log, self._view(route), self._outlets.get(route.outlet), filtered)

    def _view(self, route: Route) -> View:
        if route.prefix is not None:
            return Prefixed(route.prefix, route.filters)
        return AsWritten() if self._alone else WholeLines()

    def start(self) -> None:
        """Begin to carry. The workers have been started, and have the descriptors."""
        for stream in self._streams:
            stream.source.release()
        self._pump = Pump(self._streams, self._outlets.say)
        self._pump.start()

    def settle(self, patience: float = _PATIENCE) -> bool:
        """See that all which workers have written is in the log files and with the outlets; whether it is, in time.

        Call it before the evidence of a failure is read, and before the launcher says something about it.
        """
        return self._pump is None or self._pump.settle(patience)

    def close(self, patience: float = _PATIENCE) -> bool:
        """Carry what is left and let go of everything; whether that was done in time.

        Processes that still write get an error.
        """
        if self._closed:
            return True
        self._closed = True
        if self._pump is None:
            done = True
            for stream in self._streams:
                stream.close()
        else:
            done = self._pump.stop(patience)
        if not done:
            self._outlets.say("a log file's storage doesn't answer; the end of this attempt's output may be missing.")
        else:
            for each in self._filtered.values():
                each.close()
        for directory in self._directories.values():
            keep(directory / "error.json")
        return done
