"""The model of a teacher: its folder, its digests, and the checks against the run that it teaches."""

import hashlib
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.checkpoints.describe import read_json
from rollmesh.checkpoints.durable import sha256_of
from rollmesh.checkpoints.manifest import MANIFEST_FILE
from rollmesh.checkpoints.sealing import canonical, kept_once
from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.config.teachers import TeacherConfig
from rollmesh.errors import CheckpointError, ConfigError, DataError
from rollmesh.text import Tokenizer
from rollmesh.wire.teacher_client import check_teacher, teacher_place

_SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".model", ".txt"})
_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherModel:
    """Model folder of a teacher that fits the run."""

    name: str
    folder: Path
    vocab_size: int
    vocabulary_digest: str
    policy_vocab_size: int
    context_token_count: int
    """Most tokens of prompt and response."""
    only_temperature: float | None = None
    """Temperature that the engine computes at; None for any."""


def teacher_of(config: RunConfig, name: str) -> TeacherConfig:
    """Return a teacher of the run file. Raises ConfigError for an unknown name."""
    if name not in config.teachers:
        raise ConfigError(
            f"teachers.{name}: the run file has no such teacher; it has {', '.join(config.teachers) or 'none'}"
        )
    return config.teachers[name]


def read_teacher_model(config: RunConfig, name: str) -> TeacherModel:
    """Read the model of a teacher without its weights and check that it can teach the policy of the run.

    Raises ConfigError naming the field, the value and the remedy.
    """
    teacher, field = teacher_of(config, name), f"teachers.{name}.model"
    if teacher.model is None:
        raise ConfigError(f"{field} is missing: a process that serves this teacher needs its model folder")
    folder = resolve_model(teacher.model, field)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{field}={teacher.model}: {folder} contains no *.safetensors; other formats are not supported"
        )
    try:
        tokenizer, settings = Tokenizer(folder), read_json(folder / "config.json")
        policy = Tokenizer(resolve_model(config.model.path))
    except (CheckpointError, DataError) as error:
        raise ConfigError(f"{field}={teacher.model}: {error}") from error
    vocabulary, positions = tokenizer.vocabulary_digest, _positions(settings)
    check_teacher(config, name, vocabulary, positions, policy.vocabulary_digest)
    if teacher.top_k > min(tokenizer.vocab_size, policy.vocab_size):
        raise ConfigError(
            f"teachers.{name}.top_k={teacher.top_k}: more than the {min(tokenizer.vocab_size, policy.vocab_size)} "
            "tokens of the vocabulary; lower it"
        )
    return TeacherModel(
        name=name,
        folder=folder,
        vocab_size=tokenizer.vocab_size,
        vocabulary_digest=vocabulary,
        policy_vocab_size=policy.vocab_size,
        context_token_count=config.generator.max_context_tokens,
        only_temperature=1.0 if teacher.engine == "sglang" else None,
    )


def manifest_digest(folder: Path) -> str:
    """Return the sha256 (hex) of the names and contents of the weights, tokenizer and settings of a model folder."""
    names = sorted(file.name for file in folder.iterdir() if file.suffix in _SUFFIXES and file.name != MANIFEST_FILE)
    # A folder of the Hub's cache has links to its files.
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="digests") as pool:
        digests = pool.map(sha256_of, [(folder / name).resolve() for name in names])
        return hashlib.sha256(canonical(dict(zip(names, digests, strict=True)))).hexdigest()


def keep_digest(config: RunConfig, name: str, digest: str) -> None:
    """Record the digest of a teacher in the run folder at its first start; ConfigError if it was another one before.

    Scores of two teachers are not comparable, so a run has one model behind each name.
    """
    file = Path(config.folder) / "teachers" / f"{name}.sha256"
    if (before := kept_once(file, digest)) != digest:
        raise ConfigError(
            f"{teacher_place(config, name)}: its files have changed since this run began (digest {digest[:12]}, before "
            f"{before[:12]}), and scores of two teachers are not comparable; restore them, or start a new run"
        )


def _positions(settings: Mapping[str, Any]) -> float:
    """Return the most tokens of a context of a model."""
    inner = settings.get("text_config")
    found = (inner if isinstance(inner, dict) else settings).get("max_position_embeddings")
    return found if isinstance(found, int) else math.inf
