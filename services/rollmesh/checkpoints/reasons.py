"""Reasons of checkpoint errors."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Reason of a CheckpointError: a bounded set, usable as a metric label."""

    MISSING = "missing"
    """A folder or a file does not exist."""
    TORN = "torn"
    """The part that is written last is missing or incomplete: the writer crashed."""
    TRUNCATED = "truncated"
    """A file does not have its recorded size."""
    TAMPERED = "tampered"
    """A digest or the HMAC differs, or there are files that the manifest does not list."""
    MISMATCH = "mismatch"
    """The content is sound but is not the one in the record or in the call."""
    FOREIGN_ARCHITECTURE = "foreign_architecture"
    """The weights belong to another model."""
    FOREIGN_TOKENIZER = "foreign_tokenizer"
    """The tokenizer or its chat template differs."""
    PATH_ESCAPE = "path_escape"
    """A path leads out of the store, or through a symbolic link."""
    DISK_FULL = "disk_full"
    """The disk, the quota or the file size limit is full; a retry may succeed."""
    UNREACHABLE = "unreachable"
    """The object store does not answer; a retry may succeed."""
    REFUSED = "refused"
    """The object store refuses the call, by its permissions or for lack of a function; a retry does not help."""
    INVALID = "invalid"
    """Any other reason."""
