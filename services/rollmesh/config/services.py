"""Model, generator, store, checkpoints, evaluation and launcher sections."""

from __future__ import annotations

from typing import Any, Literal, Self
from urllib.parse import unquote

from pydantic import Field, SecretStr, model_validator

from rollmesh.config.base import Section


class ModelConfig(Section):
    """The policy before training."""

    path: str
    """Hugging Face folder (config.json, safetensors, tokenizer); ``recipe:NAME`` is a model shipped with rollmesh."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of published weights and of the engine."""
    trust_remote_code: Literal[False] = False
    """Always false: model code comes from transformers only."""


class GeneratorConfig(Section):
    """Generation."""

    replicas: int = Field(default=1, ge=0)
    """Generator processes that the launcher starts."""
    engine: Literal["torch"] = "torch"
    """torch: the embedded engine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the embedded engine computes; auto takes CUDA when there is one."""
    slots: int = Field(default=64, ge=1)
    """Most calls decoded at once by one generator."""
    max_context_tokens: int = Field(default=2048, ge=2)
    """Prompt plus response; longer requests are refused."""
    kv_token_capacity: int | None = Field(default=None, ge=1)
    """Tokens of KV cache; null is slots * max_context_tokens."""
    on_new_version: Literal["interrupt", "keep_kv", "drain"] = "interrupt"
    """What a new policy version does to running calls."""
    canary_threshold: float | None = Field(default=None, gt=0)
    """Largest logprob gap on the manifest's canary sequences before the generator leaves the rotation, in nats; null
    takes what fits model.dtype (float32 0.005, bfloat16 0.5)."""
    drain_timeout_seconds: float = Field(default=20.0, gt=0)
    """Time that SIGTERM leaves for running streams to end as interrupted; no sampled token is lost."""
    pace: list[tuple[int, float]] | None = None
    """Step-time curve [(running calls, seconds)]: sleeps every decode step to it. Emulated latency, for experiments."""


def split_password(url: str) -> tuple[str, str | None]:
    """A Redis URL without its password, and the password (percent-encoding undone); None without one."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    credentials, at, hosts = authority.rpartition("@")
    user, colon, password = credentials.partition(":")
    if not at or not colon:
        return url, None
    return f"{scheme}{separator}{user}{at if user else ''}{hosts}{slash}{path}", unquote(password)


class StoreConfig(Section):
    """The trajectory queue."""

    url: str | None = None
    """redis://, rediss://, unix:// or redis+sentinel:// URL; null starts an embedded server in the run folder. A
    password in it is taken out and treated as ``password``."""
    password: SecretStr | None = None
    """Password of the server; better from ROLLMESH_STORE__PASSWORD. It wins over one in the URL."""
    appendfsync: Literal["everysec", "always"] = "everysec"
    """Durability of the embedded server."""
    maxmemory_bytes: int = Field(default=1 << 30, ge=1 << 24)
    """Memory limit of the embedded server; admission stops at 80% of it."""
    heartbeat_seconds: float = Field(default=5.0, gt=0)
    """Heartbeat of sessions and generators."""
    session_ttl_seconds: float = Field(default=30.0, gt=0)
    """A session that has not renewed for so long is dead; its partials are leased again."""

    @model_validator(mode="before")
    @classmethod
    def _a_password_in_the_url_is_a_secret(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("url"), str):
            return data
        url, password = split_password(data["url"])
        if password is None:
            return data
        given = data.get("password")
        return {**data, "url": url, "password": password if given is None else given}

    @model_validator(mode="after")
    def _a_session_outlives_a_late_heartbeat(self) -> Self:
        if self.session_ttl_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"store.session_ttl_seconds={self.session_ttl_seconds:g} is less than twice "
                f"store.heartbeat_seconds={self.heartbeat_seconds:g}: sessions would expire between two heartbeats"
            )
        return self


class CheckpointConfig(Section):
    """Policies and trainer state."""

    folder: str | None = None
    """Shared folder; null is ``checkpoints`` in the run folder."""
    keep_last: int = Field(default=6, ge=2)
    """Published policies kept; pinned ones and those in use stay."""
    state_every_steps: int = Field(default=1, ge=1)
    """Trainer state is committed every so many steps; steps in between are replayed after a crash."""
    secret: SecretStr | None = None
    """HMAC key of the manifests; null makes one per run, in the run folder."""


class EvalConfig(Section):
    """Evaluation: its own quota, one pinned version, never trained."""

    every_versions: int = Field(default=0, ge=0)
    """Evaluate every so many policy versions during the run; 0 is only before and after. One generator serves the
    version meanwhile and the others move on; with a single generator the staleness bound may hold up training."""
    prompt_count: int = Field(default=256, ge=1)
    """Prompts of one evaluation: the same ones each time."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Answers per prompt."""
    temperature: float = Field(default=1.0, ge=0)
    """Softmax temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass."""
    top_k: int = Field(default=0, ge=0)
    """Most likely tokens kept; 0 keeps all."""
    seed: int = 20_000_000
    """Seed of the evaluation prompts and of their sampling noise."""
    before_and_after: bool = True
    """Evaluate the initial and the final policy on an idle mesh."""


class LauncherConfig(Section):
    """Local processes."""

    rollout_replicas: int = Field(default=1, ge=1)
    """Rollout workers."""
    reward_replicas: int = Field(default=1, ge=1)
    """Reward services."""
    trainer_processes: int = Field(default=1, ge=1)
    """Trainer ranks; more than one starts torchrun with FSDP2."""
    torch_threads: int = Field(default=1, ge=1)
    """OMP threads per process."""
    restart_limit: int = Field(default=20, ge=0)
    """Restarts of one service within ten minutes before the run fails."""
    start_timeout_seconds: float = Field(default=300.0, gt=0)
    """Limit for the initial policy to be published, and again for a generator to serve it; large models need more."""
    host: str = "127.0.0.1"
    """Address the local services bind to."""


class TelemetryConfig(Section):
    """Logs and trackers."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level written."""
    log_format: Literal["console", "json"] = "json"
    """Format of the service logs."""
    trackers: list[Literal["tensorboard", "wandb"]] = Field(default_factory=list)
    """Optional trackers beside metrics.jsonl (extras of the same name)."""
    tracker_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the trackers, for example {"wandb": {"project": "mine"}}."""
