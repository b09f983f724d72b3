"""Why something in the checkpoint store was refused."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Bounded reasons of a CheckpointError, fit for a metric label."""

    MISSING = "missing"
    """A folder or a file is not there."""
    TORN = "torn"
    """The part that is written last is absent or incomplete: the writer died."""
    TRUNCATED = "truncated"
    """A file is not as long as promised."""
    TAMPERED = "tampered"
    """A digest or the HMAC differs, or there are files that the manifest does not list."""
    MISMATCH = "mismatch"
    """The content is sound but not what the record or the caller names."""
    FOREIGN_ARCHITECTURE = "foreign_architecture"
    """The weights belong to another model."""
    FOREIGN_TOKENIZER = "foreign_tokenizer"
    """The tokenizer or its chat template is another one."""
    PATH_ESCAPE = "path_escape"
    """A path leads out of the store, or over a symbolic link."""
    DISK_FULL = "disk_full"
    """No space, quota or file size left; retrying later may help."""
    UNREACHABLE = "unreachable"
    """The object store does not answer, or refuses the credentials; retrying later may help."""
    INVALID = "invalid"
    """Anything else."""


PASSING = frozenset({Reason.DISK_FULL, Reason.UNREACHABLE})
"""Reasons that say nothing of what is stored: the same call may work later."""
