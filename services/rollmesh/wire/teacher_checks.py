"""Rules that a teacher of a run keeps, whoever serves it."""

from __future__ import annotations

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime.grpc import MAX_MESSAGE_BYTES

_LOGPROB_BYTES, _TOP_BYTES = 4, 8


def check_teacher(
    config: RunConfig, name: str, vocabulary_digest: str, context_token_count: float, policy_vocabulary_digest: str
) -> None:
    """Raise ConfigError for a teacher of another vocabulary or with a shorter context than the run."""
    place = teacher_place(config, name)
    if vocabulary_digest != policy_vocabulary_digest:
        raise ConfigError(
            f"{place}: another tokenizer than that of model.path={config.model.path} (vocabulary digests "
            f"{vocabulary_digest[:12]} and {policy_vocabulary_digest[:12]}), so that its log-probabilities are those "
            "of other tokens; use a teacher of the policy's model family, or start from a model of the teacher's"
        )
    longest = config.generator.max_context_tokens
    if context_token_count < longest:
        raise ConfigError(
            f"{place}: its context has {context_token_count} tokens, fewer than generator.max_context_tokens="
            f"{longest}; lower that, or use a teacher with a longer context"
        )
    top_k = config.teachers[name].top_k
    most = (MAX_MESSAGE_BYTES // longest - _LOGPROB_BYTES) // _TOP_BYTES
    if top_k > most:
        raise ConfigError(
            f"teachers.{name}.top_k={top_k}: with generator.max_context_tokens={longest} the scores of a trajectory "
            f"exceed a message of {MAX_MESSAGE_BYTES >> 20} MiB; set at most {most}"
        )


def teacher_place(config: RunConfig, name: str) -> str:
    """Return the field that says where a teacher is, with its value."""
    teacher = config.teachers[name]
    field = "model" if teacher.address is None else "address"
    return f"teachers.{name}.{field}={getattr(teacher, field)}"
