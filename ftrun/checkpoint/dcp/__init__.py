"""Checkpoints for users of ``torch.distributed.checkpoint``: see :mod:`ftrun.dcp`."""
