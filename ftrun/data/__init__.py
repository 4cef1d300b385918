"""Data loading with an exact position: which samples come in which order, and how far training has got."""
