"""The memory tier: snapshots of a node's workers in shared memory, which outlive the workers."""
