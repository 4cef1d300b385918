"""What a power loss may leave behind: file operations are recorded, and every state that POSIX allows is laid out.

======================  ==============================================================================
``shim.c``              records, preloaded into a program
``recording``           runs a program under it, and makes sure that nothing went unseen
``log``                 the operations as values
``disk``                which names and bytes a crash may leave, by what was synced and what was not
``torn``                what may be left of a file's unsynced writes
``states``              all states of all moments of a log, each one once
``folder``              a state as real files, for a reader to read
``subjects_*``          the programs that are recorded, by ``perform``
``snapshots``           what the keeper's subjects save
``lives``               subjects that are killed at each operation, and others that go on
``scratch``             where all that happens
======================  ==============================================================================

The rules are weaker than any one filesystem's. What is certain after a power loss:

* A file's bytes as of its last fsync. Each later write may be there, absent, or torn at a sector; the size may have
  grown without the bytes (zeros). Writes may be reordered.
* A directory's names as of its last fsync. Each name that changed since is, by itself, in any of the conditions
  that it went through; an fsync of the file doesn't keep its name. Directories are names in their parents like others.
* A rename is one step for the new name (the old file or the new one, never none), and loses nothing: the old name
  goes no sooner than the new one comes. It may linger.
* sync() syncs everything. Nothing appears that was never written.

All names are combined with all names. Of a file's unsynced writes, all combinations of lost, whole, torn and
size-only are made while they are few (256); beyond, one write at a time is torn or lost. Of the sectors at which a
write may be torn the first, the middle and the last one stand for all: readers here tell them apart by checksums.
What is not covered: another order of the operations of several processes than the one that was recorded.
"""
