"""What is known of the nodes of a run: what went wrong on each, which of them are left out and why, and a loaded check.

``marks`` says what counts against a node, ``history`` what is kept of each, ``standing`` where a node stands by what is
kept, and ``policy`` what follows: all of it without input or output. ``nodes_file`` keeps it in the run directory,
``memory`` is what a launcher has of it, ``check`` and ``checking`` put a load on a node that wants to come back.
"""
