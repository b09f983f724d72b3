"""Errors of rollmesh. Messages name the field or the key, the value and the remedy."""

from enum import StrEnum


class RollmeshError(Exception):
    """Base class of all errors with a known cause; any other error is a bug in rollmesh."""

    final: bool = False
    """True if a restart of the process would fail with the same error."""
    passing: bool = False
    """True if the cause is outside the process and the same call may succeed later."""


class ConfigError(RollmeshError, ValueError):
    """A value in the run file, the environment or ``--set`` is wrong."""

    final = True


class DataError(RollmeshError, ValueError):
    """A prompt, a dataset row or a token id is wrong."""

    final = True


class StoreError(RollmeshError, RuntimeError):
    """The trajectory queue cannot serve a request."""


class StoreUnavailable(StoreError):
    """Redis is down, loading, out of memory or refuses the credentials; a later retry may succeed."""

    passing = True


class SessionLost(StoreError):
    """The caller's worker session, trainer session or leadership has expired; nothing was changed."""


class Conflict(StoreError):
    """The state in Redis is not the one the caller assumed; nothing was changed."""


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


_WRONG_CONTENT = {
    Reason.TAMPERED,
    Reason.MISMATCH,
    Reason.FOREIGN_ARCHITECTURE,
    Reason.FOREIGN_TOKENIZER,
    Reason.PATH_ESCAPE,
}


class CheckpointError(RollmeshError, RuntimeError):
    """A checkpoint is torn, truncated, tampered with, missing or of another architecture.

    Reasons that mean wrong content are final, because the content does not change, and so is a refusal of the object
    store.
    """

    def __init__(self, message: str, *, reason: str = Reason.INVALID) -> None:
        super().__init__(message)
        self.reason = reason
        self.final = reason == Reason.REFUSED or reason in _WRONG_CONTENT
        self.passing = reason in {Reason.DISK_FULL, Reason.UNREACHABLE}
        self.outside = reason == Reason.REFUSED or self.passing
        """True if the cause is the storage, and not the stored content."""


class TrainingDiverged(RollmeshError, RuntimeError):
    """Updates in a row had no finite gradient, or the new policy's logprobs are not finite; a restart does not help."""

    final = True


class Unfinished(RollmeshError, RuntimeError):
    """A signal ended the process before its work was complete; nothing is lost, and a restart continues."""


class PoliciesRefused(RollmeshError, RuntimeError):
    """Every generator has tried and refused the newest policy; a restart of the generators changes nothing."""

    final = True


class EngineError(RollmeshError, RuntimeError):
    """The generation engine cannot serve a request."""


class UnsupportedModel(EngineError):
    """The engine cannot compute this model; the message names the key, the tensor or the file."""

    final = True


class GenerationRefused(RollmeshError, RuntimeError):
    """A generator refused a call before it sampled a token; another generator may accept it."""


class NoGenerator(RollmeshError, RuntimeError):
    """No registered generator serves a policy version that a call may use; a later retry may succeed."""

    passing = True


class VerifierError(RollmeshError, RuntimeError):
    """A verifier failed or returned something that is not a finite number."""


class RewardUnavailable(RollmeshError, RuntimeError):
    """No reward service answered in time; nothing was scored, and the caller may retry the call."""

    passing = True


class TeacherUnavailable(RollmeshError, RuntimeError):
    """No service of a teacher answered in time; nothing was scored, and the caller may retry the call."""

    passing = True


class NoTeacherScores(RollmeshError, RuntimeError):
    """A teacher cannot score a trajectory, took too long for it, or returned scores that are not usable."""
