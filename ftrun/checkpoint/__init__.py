"""Checkpoints: state to tensors and JSON, staging, the commit protocol, readers, restore and retention.

Modules that deal in names and records only (``layout``, ``epochs``, ``manifest``, ``reader``, ``retention``
and what they use) don't import torch.
"""
