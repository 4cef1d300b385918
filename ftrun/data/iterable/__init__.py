"""Datasets that are read in order, not by index: an exact position for them, by virtual shards.

A dataset is cut into shards whose number never changes, and the shards are dealt out to lanes. Each global batch
takes the next samples of some lanes. Which ones follows from the number of shards, the seed, the epoch and the global
batch alone, so any number of ranks and workers can go on anywhere:

``layout``      how many lanes there are, and which samples of which lane a rank takes for a batch
``lanes``       which shards a lane runs through
``datasets``    what a dataset offers, its own class or a package's, as one thing with shards
``marks``       where lanes were, with batches and in checkpoints: they save time, and decide nothing
``places``      from where a lane is read on: an open shard, a stored state, a seek, or skipping
``fetcher``     what runs in a worker
``source``      what the loader sees
``others``      other packages' loaders that a script tracks: where they can't go on exactly
``tar``         shards of our own in tar files, with an index
"""
