"""Where nodes meet: ftrun's own handler behind torch's :class:`RendezvousHandler`.

One agent hosts a TCP store at the endpoint, the one whose address the endpoint is; a thread in it leads. Each agent
keeps one record in the store and writes it anew a few times a second: how often it has done so, what it does, and the
last generation it took up. The leader reads all records at once and decides (:mod:`~ftrun.rendezvous.leader`, without
any input or output): who is lost, who is refused, when a round is called, who is in it and in which order, and when
the run is over. What it decides it publishes, and everyone obeys. So there are N records to write and one state to
read, whatever happens, and no node ever competes with another for a key.

    module                     what it is                                         thread
    ``model``, ``keys``        records, rounds, states; where they are written    -
    ``leader``, ``actions``    the leader's decisions, a state machine            -
    ``member``                 a node's decisions                                 -
    ``serving``                the leader at work in a store of its own process   the leader's
    ``scout``                  two leaders of one run find each other             the scout's
    ``hosting``                the stores that one agent serves                   main; the pulse's
    ``endpoint``               whose address it is, who listens there             any
    ``line``                   calls to a store that end in time                  one for each line
    ``look``                   what a node writes and reads at one look           a line's
    ``reach``                  how a node finds the leader, or becomes it         the pulse's
    ``pulse``                  a node's record, and what it learns                the pulse's
    ``round_store``, ``entry`` the store of one round, for torch's agent          main, through a line
    ``settings``, ``handler``  what torch's agent calls                           main

What holds everywhere:

- **No wall clocks**: how long a node has been silent is measured by the leader's own monotonic clock, and only while
  the leader is awake (a leader that was stopped for ten seconds hasn't been waiting for ten seconds).
- **Nothing waits without an end.** A call to a store can block for a quarter of an hour when its host has vanished, and
  no timeout of torch's bounds that: calls run on a thread of their own, and one that is overdue has its socket shut.
  The main thread reads fields and waits for conditions, so signals are heard and a node that is cut off notices.
- **Threads end before the process does**: one that is inside a call to a store when the interpreter ends aborts it.
- **Every round has a store of its own**, served by its first node: neither agents nor workers ever meet keys of an
  earlier one, nor can workers that were left behind reach the new one.
- **Old ranks keep their order**, newcomers come behind them; the first round begins with the host. A generation number
  only grows, even when the host is started anew: nodes bring along the last round that they have seen.
- **The host may be lost.** Every agent serves a store that stands by; the members of the last round are the heirs, in
  the order of their ranks, and the first that lives leads. A round needs most members of the one before it (or half,
  with the leader that formed that one among them), so of two sides of a cut one at most goes on, and workers start only
  when all members of a round have taken it up. ``quorum=0`` gives that up, ``failover=0`` leaves the run with its first
  host. What remains: a new agent that knows only the endpoint of a host that is gone finds nobody there.

Nothing in the worker's process imports this package.
"""
