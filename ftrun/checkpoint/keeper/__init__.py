"""The node's I/O process: it drains sealed snapshots outward and commits them."""
