"""Model, generator, store, checkpoints, evaluation and launcher sections."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr, model_validator

from rollmesh.config.section import Section, Temperature
from rollmesh.config.security import StoreTlsConfig


class ModelConfig(Section):
    """The policy before training."""

    path: str
    """Hugging Face folder (config.json, safetensors, tokenizer); ``recipe:NAME`` is a model shipped with rollmesh."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of published weights and of the engine."""
    trust_remote_code: Literal[False] = False
    """Always false: model code comes from transformers only."""


_OWN_FLAGS = frozenset(
    {
        "--model-path", "--model", "--host", "--port", "--api-key", "--admin-api-key", "--skip-tokenizer-init",
        "--weight-version", "--context-length", "--config", "--max-running-requests", "--max-total-tokens", "--dtype",
        "--device",
    }
)  # fmt: skip
_STARTED_ONLY = ("python", "arguments", "environment")


def _is_public(url: str) -> bool:
    """Whether a URL names a public address in figures; what a name means is not known here."""
    try:
        return ip_address(urlsplit(url).hostname or "").is_global
    except ValueError:
        return False


class SglangConfig(Section):
    """The SGLang server behind ``generator.engine: sglang``."""

    url: str | None = None
    """http(s):// address of a server that runs already and reads the same checkpoint folder; null starts one."""
    python: str | None = None
    """Python interpreter of the environment that has SGLang; null is the one that runs rollmesh."""
    arguments: list[str] = Field(default_factory=list)
    """Further flags of the server, for example ["--tp-size", "8"]; those that rollmesh sets itself are refused."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the server, beside those of this process."""
    interrupt: Literal["retract", "abort"] = "retract"
    """What on_new_version=interrupt does to running requests: retract prefills them again under the new weights and
    goes on, abort ends them as interrupted."""
    start_timeout_seconds: float = Field(default=600.0, gt=0)
    """Limit for a server to become ready, its start and loading included, or to be reached at its url."""
    request_timeout_seconds: float = Field(default=300.0, gt=0)
    """Limit for one slice of a call (rollout.partial_save_tokens tokens), time in a paused server not counted."""
    update_timeout_seconds: float = Field(default=600.0, gt=0)
    """Limit for the server to load a policy from disk."""
    admin_key: SecretStr | None = None
    """Key of the server's endpoints; null makes one per process for a server that is started, and sends none to one
    at a url. Better from ROLLMESH_GENERATOR__SGLANG__ADMIN_KEY."""

    @model_validator(mode="after")
    def _the_server_is_started_or_found(self) -> Self:
        if self.url is not None:
            if not self.url.startswith(("http://", "https://")):
                raise ValueError(f"generator.sglang.url={self.url}: expected http:// or https://")
            if self.url.startswith("http://") and _is_public(self.url):
                raise ValueError(
                    f"generator.sglang.url={self.url}: HTTP would carry the key and every token over a public network "
                    "in the clear; use https://, or a private address"
                )
            for name in _STARTED_ONLY:
                if getattr(self, name):
                    raise ValueError(
                        f"generator.sglang.{name} is for a server that rollmesh starts; "
                        f"generator.sglang.url={self.url} names one that runs already"
                    )
        return self

    @model_validator(mode="after")
    def _flags_have_one_owner(self) -> Self:
        for argument in self.arguments:
            flag = argument.split("=", 1)[0]
            # The server takes abbreviations too: --hos is --host.
            owns = sorted(own for own in _OWN_FLAGS if own.startswith(flag)) if len(flag) > 2 else []
            if flag.startswith("--") and owns:
                raise ValueError(f"generator.sglang.arguments: {flag} ({owns[0]}) is set by rollmesh from the run file")
        return self


class GeneratorConfig(Section):
    """Generation."""

    replicas: int = Field(default=1, ge=0)
    """Generator processes that the launcher starts."""
    engine: Literal["torch", "sglang"] = "torch"
    """torch: the embedded engine; sglang: an SGLang server, see ``sglang``."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine computes; auto takes CUDA when there is one (sglang: leaves it to the server)."""
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
    refused_versions_limit: int = Field(default=3, ge=1)
    """Policy versions in a row that every generator refuses before the run ends. It also ends when they refuse the
    newest one for launcher.start_timeout_seconds."""
    drain_timeout_seconds: float = Field(default=20.0, gt=0)
    """Time that SIGTERM leaves for running streams to end as interrupted; no sampled token is lost."""
    pace: list[tuple[int, float]] | None = None
    """Step-time curve [(running calls, seconds)]: sleeps every decode step to it. Emulated latency, for experiments."""
    cuda_graphs: bool = False
    """engine=torch on a GPU: decode by CUDA graphs, one per bucket of rows, instead of a launch per operation. Not yet
    run on a GPU. On a CPU the same padded steps run without capture: slower, for tests."""
    sglang: SglangConfig = Field(default_factory=SglangConfig)
    """The SGLang server."""

    @model_validator(mode="after")
    def _the_engine_can_do_it(self) -> Self:
        if self.engine != "sglang":
            return self
        if self.pace is not None:
            raise ValueError("generator.pace sleeps the steps of engine=torch; an SGLang server has its own pace")
        if self.cuda_graphs:
            raise ValueError("generator.cuda_graphs is for engine=torch; an SGLang server captures its own graphs")
        if self.sglang.url is not None and self.replicas > 1:
            raise ValueError(
                f"generator.replicas={self.replicas} generators cannot share the server at generator.sglang.url="
                f"{self.sglang.url}: each loads policies into its own"
            )
        if self.sglang.url is not None and self.device != "auto":
            raise ValueError(
                f"generator.device={self.device}: the server at generator.sglang.url={self.sglang.url} has a device"
            )
        return self


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
    """redis://, rediss:// (TLS), unix://, redis+sentinel:// or rediss+sentinel:// URL, with the ACL user before the @;
    null starts an embedded server in the run folder. A password in it is taken out and treated as ``password``."""
    password: SecretStr | None = None
    """Password of the server; better from ROLLMESH_STORE__PASSWORD. It wins over one in the URL."""
    sentinel_password: SecretStr | None = None
    """Password of the sentinels themselves; null sends none. Better from ROLLMESH_STORE__SENTINEL_PASSWORD."""
    tls: StoreTlsConfig = Field(default_factory=StoreTlsConfig)
    """TLS to the server and to its sentinels."""
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
    def _tls_goes_with_a_tls_url(self) -> Self:
        if self.tls.configured and not (self.url or "").startswith("rediss"):
            raise ValueError(f"store.tls is for rediss:// and rediss+sentinel:// URLs, not store.url={self.url}")
        return self

    @model_validator(mode="after")
    def _a_session_outlives_a_late_heartbeat(self) -> Self:
        if self.session_ttl_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"store.session_ttl_seconds={self.session_ttl_seconds:g} is less than twice "
                f"store.heartbeat_seconds={self.heartbeat_seconds:g}: sessions would expire between two heartbeats"
            )
        return self


OBJECT_STORES = ("s3://", "gs://")


class CheckpointConfig(Section):
    """Policies and trainer state."""

    folder: str | None = None
    """Shared folder; null is ``checkpoints`` in the run folder. Or an object store, s3://BUCKET/PREFIX (extra ``s3``)
    or gs://BUCKET/PREFIX (extra ``gs``), with the usual credentials of its clients from the environment."""
    cache_folder: str | None = None
    """With an object store: folder of this node that policies are pulled into, once for all its processes; null is
    ``checkpoints`` in the run folder."""
    cache_policies: int = Field(default=3, ge=1)
    """With an object store: pulled policies that a node keeps beside those used in the last ten minutes."""
    parallel_transfers: int = Field(default=8, ge=1, le=64)
    """With an object store: files of one policy or state that a process moves at once."""
    object_store: dict[str, Any] = Field(default_factory=dict)
    """With an object store: options of its fsspec file system, for example {"endpoint_url": "https://minio:9000"}."""
    keep_last: int = Field(default=6, ge=2)
    """Published policies kept; pinned ones and those in use stay."""
    state_every_steps: int = Field(default=1, ge=1)
    """Trainer state is committed every so many steps; steps in between are replayed after a crash. Only 1 with
    trainer.algorithm.old_logprobs=stage_end."""
    secret: SecretStr | None = None
    """HMAC key of the manifests; null makes one per run, in the run folder."""

    @property
    def remote(self) -> bool:
        """Whether ``folder`` is an object store."""
        return self.folder is not None and "://" in self.folder

    @model_validator(mode="after")
    def _the_folder_is_one_that_is_known(self) -> Self:
        if self.remote and not str(self.folder).startswith(OBJECT_STORES):
            raise ValueError(
                f"checkpoints.folder={self.folder}: expected a folder, or one of {', '.join(OBJECT_STORES)}"
            )
        if self.object_store and not self.remote:
            raise ValueError(f"checkpoints.object_store is for an object store; checkpoints.folder={self.folder}")
        for name in ("key", "secret", "token", "password"):
            if name in self.object_store:
                raise ValueError(
                    f"checkpoints.object_store.{name}: credentials are no part of a run file; give them to the "
                    "client by its environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...)"
                )
        return self


class EvalConfig(Section):
    """Evaluation: its own quota, one pinned version, never trained."""

    every_versions: int = Field(default=0, ge=0)
    """Evaluate every so many policy versions during the run; 0 is only before and after. One generator serves the
    version meanwhile and the others move on; with a single generator the staleness bound may hold up training."""
    prompt_count: int = Field(default=256, ge=1)
    """Prompts of one evaluation: the same ones each time."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Answers per prompt."""
    temperature: Temperature = 1.0
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
    """Restarts of one process within ten minutes of its service before the run fails. Time in which it starts does not
    count as service."""
    start_timeout_seconds: float = Field(default=300.0, gt=0)
    """Limit for the initial policy to be published, and again for a generator to serve it; large models need more."""
    host: str = "127.0.0.1"
    """Address the local services bind to."""


class TelemetryConfig(Section):
    """Logs, traces and trackers."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level written."""
    log_format: Literal["console", "json"] = "json"
    """Format of the service logs."""
    otlp_endpoint: str | None = None
    """Address of an OpenTelemetry collector (OTLP over HTTP), for example http://collector:4318; null traces nothing.
    Needs the extra ``tracing``."""
    trace_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of trajectories and train steps that are traced; every service picks the same ones."""
    trackers: list[Literal["tensorboard", "wandb"]] = Field(default_factory=list)
    """Optional trackers beside metrics.jsonl (extras of the same name)."""
    tracker_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the trackers, for example {"wandb": {"project": "mine"}}."""
