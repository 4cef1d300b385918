"""Fetching ahead of the loaders: a process per node that knows the order, and outlives the ranks.

How it holds together, for whoever changes it:

- A loader over files of a cache is registered by the node's first rank: a *plan* (what is read in which order, by which
  ranks of how many, and how to reach the cache) and a *page* (how far the training is), both in a directory of the run
  below the cache's root. Local disk: found again after a restart of the machine.
- The filler's process reads plans and pages, and brings into the cache what this node's ranks read next. It holds
  nothing that is lost with it, and the ranks get by without it: they fetch what isn't there.
- When the worker group starts again the launcher writes down where it will resume, before the ranks have started.
- What must be evicted is what is read last of all: the order says when that is.
- A spare asks for the plans in the run directory, and the run's first node copies them there, with how far it is. The
  spare's filler, a slow one, fetches what the run's last ranks read: who takes a seat comes behind the others.

Nothing here imports torch, but for :mod:`ftrun.data.filler.registering`'s callers, who have it.
"""
