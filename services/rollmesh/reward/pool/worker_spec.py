"""Startup parameters of the template process, sent as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.tasks.verifiers.verifier_registry import BUILT_IN

_ITEMS_PER_WORKER = 20_000
_NEEDS_OPTIONS = frozenset({"regex", "http_judge", "composite"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Common parameters of worker processes."""

    tokenizer_folder: str
    default_verifier: str
    default_options: Mapping[str, Any]
    required_verifiers: tuple[str, ...]
    """Verifiers required in addition to the default; the service does not start without them."""
    optional_verifiers: tuple[str, ...]
    """Verifiers that rows of the data set may name; loaded if their packages are installed."""
    answer_after: str | None
    template_variables: Mapping[str, Any]
    """Variables of the chat template, which may open a thought."""
    timeout_seconds: float
    memory_limit_bytes: int
    items_per_worker: int = _ITEMS_PER_WORKER
    """Number of answers after which a worker is replaced, to limit memory leaks and caches of libraries."""

    def to_json(self) -> str:
        """Encode as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> WorkerSpec:
        """Decode from JSON."""
        fields = json.loads(text)
        for name in ("required_verifiers", "optional_verifiers"):
            fields[name] = tuple(fields[name])
        return WorkerSpec(**fields)


def worker_spec(config: RunConfig) -> WorkerSpec:
    """Build the spec of a run; raises ConfigError if the model folder is missing."""
    required, optional = needed_verifiers(config)
    return WorkerSpec(
        tokenizer_folder=str(resolve_model(config.model.path)),
        default_verifier=config.reward.verifier,
        default_options=config.reward.options,
        required_verifiers=required,
        optional_verifiers=optional,
        answer_after=config.reward.answer_after,
        template_variables=config.data.chat_template_kwargs,
        timeout_seconds=config.reward.timeout_seconds,
        memory_limit_bytes=config.reward.memory_limit_bytes,
    )


def needed_verifiers(config: RunConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of verifiers that this run's prompts may name, without the default: (required, optional)."""
    required: set[str] = set()
    optional: set[str] = set()
    for source in config.data.sources.values():
        if source.task_verifier:
            required.add(source.task_verifier)
        elif source.rows_name_verifiers:
            optional |= set(BUILT_IN) - _NEEDS_OPTIONS
    required.discard(config.reward.verifier)
    optional -= required | {config.reward.verifier}
    return tuple(sorted(required)), tuple(sorted(optional))
