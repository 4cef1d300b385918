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
    ``seen``                   a node as the leader sees it                       -
    ``quorum``, ``tie``        who may form the next round; which half goes on    -
    ``preflight``              who reaches whom, before a first round             -
    ``founding``               whether a node begins a run                        -
    ``shelf``, ``wire``        the leader's store, and calls to it                the store's; any
    ``serving``                the leader at work in a store of its own process   the leader's
    ``scout``                  two leaders of one run find each other             the scout's
    ``note``, ``noting``       where the run is led, in a shared directory        the noting's
    ``hosting``                the store that one agent serves                    main; the pulse's
    ``endpoint``               whose address it is, who listens there             any
    ``look``                   what a node writes and reads at one look           the pulse's
    ``visiting``, ``reach``    how a node finds the leader, or becomes it         the pulse's
    ``trying``                 a node tries to connect to others                  its own, a few
    ``pulse``                  a node's record, and what it learns                the pulse's
    ``line``                   calls to a store of torch's that end in time       one for each line
    ``round_store``, ``entry`` the store of one round, for torch's agent          main, through a line
    ``torch_store``            how that one is served                             its own
    ``waiting``                how a node waits for its next round                main
    ``settings``, ``handler``  what torch's agent calls                           main

What holds everywhere:

- **No wall clocks**: how long a node has been silent is measured by the leader's own monotonic clock, and only while
  the leader is awake (a leader that was stopped for ten seconds hasn't been waiting for ten seconds).
- **Nothing waits without an end.** A call to a store of torch's can block for a quarter of an hour when its host has
  vanished, and no timeout bounds that; its server looks up the names of those who connect, and serves nobody meanwhile.
  Nodes and leader use a store of our own. Calls to torch's run on a thread of their own, and one that is overdue has
  its socket shut. The main thread reads fields and waits for conditions, so signals are heard and a cut is noticed.
- **Threads end before the process does**: one that is inside a call to a store of torch's then aborts it. Where one
  can't be waited for, ``ftrun.__main__`` ends the process before the interpreter does.
- **Every round has a store of its own**, served by its first node: neither agents nor workers ever meet keys of an
  earlier one, nor can workers that were left behind reach the new one.
- **Old ranks keep their order**, newcomers come behind them; the first round begins with the host. A generation number
  only grows, even when the host is started anew: nodes bring along the last round that they have seen.
- **The host may be lost.** Every agent serves a store that stands by; the members of the last round are the heirs, in
  the order of their ranks, and the first that lives leads. A round needs most members of the one before it (or half,
  with the leader that formed that one among them), so of two sides of a cut one at most goes on, and workers start only
  when all members of a round have taken it up. A node that is cut off stops its workers
  before the others go on. Of two halves the one with the leader goes on, or, where nodes share a directory, the one
  that claims the round there first (:mod:`~ftrun.rendezvous.tie`), so that either of two nodes may be lost; once it
  shows no sign there for long, the other one may, and it may no longer.
  ``quorum=0`` gives the majority up, ``failover=0`` leaves the run with its first host.
- **A run is begun once.** An endpoint may be a list, and a note in the run directory says where the leader is: a new
  agent, that of the old host included, looks everywhere before it begins a run, and never does while the note changes.
- **Nodes that meet for the first time try to reach each other**, and so do all once workers have fallen; who can't is
  named and left out (``preflight=0`` doesn't ask).

Nothing in the worker's process imports this package.
"""
