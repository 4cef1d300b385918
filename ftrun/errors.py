"""What can go wrong, as types.

    FtrunError
    ├── UsageError (ValueError)          the user's mistake; exit code 2, never retried
    │   ├── ConfigError                  a job file or an option; carries every finding with its line
    │   ├── RunDirError                  a run directory that is in use, foreign or unusable
    │   │   └── RunDirTaken              it is another launcher's
    │   ├── StateMismatch                tracked objects, data or total don't fit the checkpoint
    │   ├── NotStorable (TypeError)      a value that can't be stored without pickle
    │   └── NoValidCheckpoint            commits exist and none of them is whole
    ├── CheckpointError (OSError)        storage let us down; training may go on
    │   ├── CorruptCheckpoint            bytes differ from what the manifest says
    │   ├── Disagreement                 ranks of one save stand at different positions
    │   └── LostSnapshot                 a snapshot in memory can't be used, and isn't committed
    └── AgreementTimeout (TimeoutError)  another rank did not answer in time

Every message says what happened, where, and what to type next.
"""

from __future__ import annotations


class FtrunError(Exception):
    """Base of everything that ftrun raises on purpose."""


class UsageError(FtrunError, ValueError):
    """The user's mistake: exit code 2, nothing written, never retried."""


class ConfigError(UsageError):
    """A job file or command line that can't be used.

    Attributes:
        findings: one message for each thing found, ``file:line:column: text`` where there is a line.
    """

    def __init__(self, findings: list[str]) -> None:
        super().__init__("\n".join(findings))
        self.findings = findings


class RunDirError(UsageError):
    """A run directory that is in use, foreign or unusable."""


class RunDirTaken(RunDirError):
    """A run directory that another launcher uses, or has made meanwhile."""


class StateMismatch(UsageError):
    """What the script tracks, reads or asks for doesn't fit the checkpoint that it resumes from."""


class NotStorable(UsageError, TypeError):
    """A value in the tracked state that can't be stored without pickle; the message names its path."""


class NoValidCheckpoint(UsageError):
    """Commits exist and none of them is whole: starting afresh would lose work, so nothing starts."""


class CheckpointError(FtrunError, OSError):
    """Writing or reading a checkpoint failed."""


class CorruptCheckpoint(CheckpointError):
    """Bytes of a committed checkpoint differ from what its manifest says.

    Attributes:
        attempt: name of the checkpoint's directory.
        detail: which file, and what is wrong with it.
    """

    def __init__(self, detail: str, attempt: str) -> None:
        super().__init__(f"checkpoint {attempt}: {detail}; an older one is used on the next start")
        self.attempt = attempt
        self.detail = detail


class LostSnapshot(CheckpointError):
    """A snapshot in memory that a run was to resume from can't be used, and nobody is known to have committed it."""


class Disagreement(CheckpointError):
    """Ranks that save together stand at different steps or data positions: no further try makes it one checkpoint."""


class AgreementTimeout(FtrunError, TimeoutError):
    """Another rank did not publish or answer within the deadline."""
