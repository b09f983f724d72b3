"""Manifest of a published policy: the files of the folder, its writer, and reference scores of its weights.

It is written last, so a folder without a complete manifest is not a policy. The registry in Redis has the digest of the
manifest, and the manifest has the digest of every file. The HMAC ties both to the run's secret.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollmesh.checkpoints.durable import check_file, confined, regular_files, sha256_of
from rollmesh.checkpoints.sealing import canonical, seal, sealed
from rollmesh.errors import CheckpointError, Reason
from rollmesh.types import PolicyRecord

MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 16 << 20

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ManifestFile(_Closed):
    """Path, size and digest of one file of the folder."""

    path: str
    """Relative POSIX path."""
    size_bytes: int = Field(ge=0)
    """Length of the file."""
    sha256: Digest
    """Digest of the content."""


class ModelShape(_Closed):
    """Architecture fields that must match before weights are loaded into a running engine."""

    model_type: str
    """Hugging Face model type, for example ``qwen2``."""
    vocab_size: int = Field(ge=1)
    """Rows of the embedding."""
    hidden_size: int = Field(ge=1)
    """Width of the hidden states."""
    layer_count: int = Field(ge=1)
    """Number of transformer blocks."""
    head_count: int = Field(ge=1)
    """Number of query heads."""
    kv_head_count: int = Field(ge=1)
    """Number of key-value heads."""
    intermediate_size: int = Field(ge=0)
    """Width of the MLP; 0 if the config has no such field."""
    tied_embeddings: bool
    """True if the output layer shares the embedding."""


class WeightDelta(_Closed):
    """Weights that a bucket stores as their difference to another policy version."""

    base: PolicyRecord
    """Version that the deltas are applied to."""
    files: list[ManifestFile] = Field(min_length=1)
    """Deltas; each stands for the weight file of its name without ``.delta``."""


class CanarySequence(_Closed):
    """A fixed sequence with the trainer's log-probabilities, which an engine must reproduce."""

    token_ids: list[int] = Field(min_length=2)
    """Tokens, int32."""
    logprobs: list[float]
    """log_softmax at T=1 of tokens 1.. given their predecessors, [tokens - 1]."""

    @model_validator(mode="after")
    def _one_logprob_per_predicted_token(self) -> Self:
        if len(self.logprobs) != len(self.token_ids) - 1:
            raise ValueError(f"logprobs: {len(self.token_ids)} token_ids require {len(self.token_ids) - 1} logprobs")
        return self


class Manifest(_Closed):
    """Description of a policy folder that readers verify before they load it."""

    format: Literal[1] = 1
    """Layout of this file."""
    policy_version: int = Field(ge=0)
    """Version of the weights; never reused."""
    train_step: int = Field(ge=0)
    """Number of batches that the weights were trained on."""
    parent: int | None
    """Policy version that the weights were trained from; null for the initial policy."""
    kind: Literal["full", "adapter"] = "full"
    """Full weights, or a PEFT folder that readers apply above ``base``."""
    base: PolicyRecord | None = None
    """Full weights that an adapter was trained above; a manifest of full weights does not contain the field."""
    delta: WeightDelta | None = None
    """Deltas that a bucket has in place of weight files; ``files`` describes the result. Only where there are some."""
    session: str
    """Trainer session that wrote the folder."""
    files: list[ManifestFile] = Field(min_length=1)
    """Every file of the folder but the manifest."""
    architecture: ModelShape
    """Summary of config.json."""
    dtype: str
    """Dtype of most weights, by its safetensors name, for example ``F32``."""
    parameter_count: int = Field(ge=1)
    """Number of stored elements."""
    tokenizer_sha256: Digest
    """Digest over the tokenizer's files."""
    chat_template_sha256: Digest
    """Digest of the chat template; the digest of an empty string if there is none."""
    canary: list[CanarySequence] = Field(min_length=1)
    """Fixed sequences with the trainer's log-probabilities, for the canary check of readers."""
    create_time: datetime
    """Time of writing, UTC."""
    hmac: str = ""
    """HMAC-SHA256 (hex) of the canonical JSON of all other fields, keyed with the run's secret."""

    @model_validator(mode="after")
    def _an_adapter_has_a_base(self) -> Self:
        if (self.kind == "adapter") != (self.base is not None):
            raise ValueError(f"base: kind {self.kind} {'requires a' if self.base is None else 'has no'} base")
        return self

    @property
    def stored_files(self) -> list[ManifestFile]:
        """The files that a bucket stores: deltas in place of the weights that they stand for."""
        if self.delta is None:
            return list(self.files)
        replaced = {file.path.removesuffix(".delta") for file in self.delta.files}
        return [*(file for file in self.files if file.path not in replaced), *self.delta.files]

    def signed(self, secret: bytes) -> "Manifest":
        """Return a copy with the HMAC filled in."""
        return self.model_copy(update={"hmac": seal(secret, self._signed_bytes())})

    def check_signature(self, secret: bytes) -> None:
        """Raise CheckpointError (tampered) unless the HMAC matches."""
        if not sealed(secret, self._signed_bytes(), self.hmac):
            raise CheckpointError(
                f"policy_version {self.policy_version}: the manifest's HMAC does not match this run's secret",
                reason=Reason.TAMPERED,
            )

    def check_compatible(self, other: "Manifest") -> None:
        """Raise CheckpointError unless ``other`` has the same architecture, tokenizer and chat template."""
        if self.architecture != other.architecture:
            expected, found = self.architecture.model_dump(), other.architecture.model_dump()
            gaps = [f"{k}={found[k]!r}, expected {v!r}" for k, v in expected.items() if found[k] != v]
            raise CheckpointError(
                f"policy_version {other.policy_version}: different architecture ({'; '.join(gaps)})",
                reason=Reason.FOREIGN_ARCHITECTURE,
            )
        for field in ("tokenizer_sha256", "chat_template_sha256"):
            if getattr(self, field) != getattr(other, field):
                raise CheckpointError(
                    f"policy_version {other.policy_version}: {field} is {getattr(other, field)}, "
                    f"expected {getattr(self, field)}",
                    reason=Reason.FOREIGN_TOKENIZER,
                )

    def to_bytes(self) -> bytes:
        """Return the content of the manifest file."""
        return canonical(self._fields())

    def _signed_bytes(self) -> bytes:
        return canonical({name: value for name, value in self._fields().items() if name != "hmac"})

    def _fields(self) -> dict[str, Any]:
        absent = {name for name in ("base", "delta") if getattr(self, name) is None}
        return self.model_dump(mode="json", exclude=absent)


def parse_manifest(data: bytes, origin: str) -> Manifest:
    """Parse a manifest. Raises CheckpointError (torn) if it is incomplete or not a manifest."""
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"]) or "(whole file)"
        raise CheckpointError(
            f"{origin}: not a complete manifest: {where}: {first['msg']}", reason=Reason.TORN
        ) from error


_THREADS = 8


def manifest_files(folder: Path, known: Mapping[str, str]) -> list[ManifestFile]:
    """Return path, size and digest of every file below ``folder``.

    ``known`` has the digests, by path, of files that were digested while they were written; they are not read again.
    """

    def describe(name: str) -> ManifestFile:
        path = folder / name
        return ManifestFile(path=name, size_bytes=path.stat().st_size, sha256=known.get(name) or sha256_of(path))

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="digests") as pool:
        return list(pool.map(describe, regular_files(folder)))


def check_files(folder: Path, files: Iterable[ManifestFile]) -> None:
    """Compare files with their recorded sizes and digests. Raises CheckpointError for the first one that differs."""

    def check(file: ManifestFile) -> None:
        check_file(confined(folder, file.path), size=file.size_bytes, sha256=file.sha256)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="digests") as pool:
        list(pool.map(check, files))
