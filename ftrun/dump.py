"""The signal by which the agent asks a worker for the stacks of its threads, and the file that they go to.

Known to both sides, neither of which imports the other.
"""

from __future__ import annotations

# A real-time signal: SIGUSR1 and SIGUSR2 belong to the user, to Slurm and to ftrun's own requests. Libraries that take
# real-time signals count from the lowest (34 or 35; the two below belong to the C library) or from the highest (64), a
# service manager has its meanings for most of 34 to 38, 47 to 51 and 54 to 63. 45 lies between them, and is
# the same number under every C library.
SIGNAL = 45

FILE = "stacks.txt"
