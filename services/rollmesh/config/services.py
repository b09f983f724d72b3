"""Model, generator, store, checkpoints, evaluation and launcher sections."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr, model_validator

from rollmesh.config.section import Section, Temperature
from rollmesh.config.security import StoreTlsConfig


class ModelConfig(Section):
    """Initial policy."""

    path: str
    """Hugging Face folder (config.json, safetensors, tokenizer); ``recipe:NAME`` is a model packaged with rollmesh."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of published weights and of the engine."""


_OWN_FLAGS = frozenset(
    {
        "--model-path", "--model", "--host", "--port", "--api-key", "--admin-api-key", "--skip-tokenizer-init",
        "--weight-version", "--context-length", "--config", "--max-running-requests", "--max-total-tokens", "--dtype",
        "--device",
    }
)  # fmt: skip
_STARTED_ONLY = ("python", "arguments", "environment")


def _is_public(url: str) -> bool:
    """Tell whether the host of a URL is a public IP address; host names are not resolved."""
    try:
        return ip_address(urlsplit(url).hostname or "").is_global
    except ValueError:
        return False


class SglangConfig(Section):
    """The SGLang server behind ``generator.engine: sglang``."""

    url: str | None = None
    """http(s):// address of a running server that reads the same checkpoint folder; null starts a server."""
    python: str | None = None
    """Python interpreter of the environment with SGLang; null is the interpreter of rollmesh."""
    arguments: list[str] = Field(default_factory=list)
    """Further flags of the server, for example ["--tp-size", "8"]; flags that rollmesh sets are rejected."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the server, added to those of this process."""
    interrupt: Literal["retract", "abort"] = "retract"
    """Effect of on_new_version=interrupt on running requests: retract prefills them again with the new weights and
    continues, abort ends them as interrupted."""
    start_timeout_seconds: float = Field(default=600.0, gt=0)
    """Time limit for a started server to become ready, loading included, or for the server at ``url`` to be
    reachable."""
    request_timeout_seconds: float = Field(default=300.0, gt=0)
    """Time limit for one slice of a call (rollout.partial_save_tokens tokens), without the time in a paused server."""
    update_timeout_seconds: float = Field(default=600.0, gt=0)
    """Time limit for the server to load a policy from disk."""
    admin_key: SecretStr | None = None
    """Key of the server's endpoints. null creates a key per process for a started server, and sends none to a server at
    ``url``. Preferably from ROLLMESH_GENERATOR__SGLANG__ADMIN_KEY."""

    @model_validator(mode="after")
    def _the_server_is_started_or_found(self) -> Self:
        if self.url is not None:
            if not self.url.startswith(("http://", "https://")):
                raise ValueError(f"generator.sglang.url={self.url}: expected http:// or https://")
            if self.url.startswith("http://") and _is_public(self.url):
                raise ValueError(
                    f"generator.sglang.url={self.url}: HTTP would send the key and every token unencrypted over a "
                    "public network; use https://, or a private address"
                )
            for name in _STARTED_ONLY:
                if getattr(self, name):
                    raise ValueError(
                        f"generator.sglang.{name} is for a server that rollmesh starts; "
                        f"generator.sglang.url={self.url} is a running server; leave one of the two out"
                    )
        return self

    @model_validator(mode="after")
    def _flags_have_one_owner(self) -> Self:
        for argument in self.arguments:
            flag = argument.split("=", 1)[0]
            # The server accepts abbreviations: --hos is --host.
            owns = sorted(own for own in _OWN_FLAGS if own.startswith(flag)) if len(flag) > 2 else []
            if flag.startswith("--") and owns:
                raise ValueError(
                    f"generator.sglang.arguments: {flag} ({owns[0]}) is set by rollmesh from the run file; leave it out"
                )
        return self


class GeneratorConfig(Section):
    """Generation."""

    replicas: int = Field(default=1, ge=0)
    """Generator processes that the launcher starts."""
    engine: Literal["torch", "sglang"] = "torch"
    """torch: the embedded engine; sglang: an SGLang server, see ``sglang``."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engine; auto uses CUDA when available (with sglang, the server decides)."""
    slots: int = Field(default=64, ge=1)
    """Maximum number of calls that one generator decodes at once."""
    max_context_tokens: int = Field(default=2048, ge=2)
    """Maximum length of prompt plus response; longer requests are rejected."""
    kv_token_capacity: int | None = Field(default=None, ge=1)
    """Tokens of KV cache; null is slots * max_context_tokens."""
    on_new_version: Literal["interrupt", "keep_kv", "drain"] = "interrupt"
    """Effect of a new policy version on running calls."""
    canary_threshold: float | None = Field(default=None, gt=0)
    """Largest logprob gap on the manifest's canary sequences, in nats, above which the generator stops serving; null
    uses the value for model.dtype (float32 0.005, bfloat16 0.5)."""
    refused_versions_limit: int = Field(default=3, ge=1)
    """Number of consecutive policy versions refused by every generator that ends the run. The run also ends when all
    generators refuse the newest version for launcher.start_timeout_seconds."""
    drain_timeout_seconds: float = Field(default=20.0, gt=0)
    """Time after SIGTERM for running streams to end as interrupted; no sampled token is lost."""
    pace: list[tuple[int, float]] | None = None
    """Step-time curve [(running calls, seconds)], to which every decode step is slowed down by sleeping; emulates
    latency in experiments."""
    cuda_graphs: bool = False
    """engine=torch on a GPU: decode with CUDA graphs, one per bucket of rows, instead of one launch per operation. Not
    yet run on a GPU. On a CPU the same padded steps run without capture; slower, for tests."""
    sglang: SglangConfig = Field(default_factory=SglangConfig)
    """SGLang server."""

    @model_validator(mode="after")
    def _the_engine_can_do_it(self) -> Self:
        if self.engine != "sglang":
            return self
        if self.pace is not None:
            raise ValueError("generator.pace is for engine=torch only: leave it out with engine=sglang")
        if self.cuda_graphs:
            raise ValueError(
                "generator.cuda_graphs is for engine=torch only: leave it out, an SGLang server captures its graphs"
            )
        if self.sglang.url is not None and self.replicas > 1:
            raise ValueError(
                f"generator.replicas={self.replicas} generators cannot share the server at generator.sglang.url="
                f"{self.sglang.url}, because each loads policies into its server; set 1"
            )
        if self.sglang.url is not None and self.device != "auto":
            raise ValueError(
                f"generator.device={self.device}: the server at generator.sglang.url={self.sglang.url} has chosen its "
                "device; set auto"
            )
        return self


def split_password(url: str) -> tuple[str, str | None]:
    """Split a Redis URL into the URL without its password and the percent-decoded password; None without one."""
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
    null starts an embedded server in the run folder. A password in the URL is removed and used as ``password``."""
    password: SecretStr | None = None
    """Password of the server, preferably from ROLLMESH_STORE__PASSWORD; it takes precedence over one in the URL."""
    sentinel_password: SecretStr | None = None
    """Password of the sentinels; null sends none. Preferably from ROLLMESH_STORE__SENTINEL_PASSWORD."""
    tls: StoreTlsConfig = Field(default_factory=StoreTlsConfig)
    """TLS to the server and to its sentinels."""
    appendfsync: Literal["everysec", "always"] = "everysec"
    """Fsync policy of the embedded server's append-only file."""
    maxmemory_bytes: int = Field(default=1 << 30, ge=1 << 24)
    """Memory limit of the embedded server; admission stops at 80% of it."""
    heartbeat_seconds: float = Field(default=5.0, gt=0)
    """Heartbeat interval of sessions and generators."""
    session_ttl_seconds: float = Field(default=30.0, gt=0)
    """Time without a heartbeat after which a session is dead; its partial trajectories are leased again."""

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
    """Shared folder, or an object store: s3://BUCKET/PREFIX (extra ``s3``) or gs://BUCKET/PREFIX (extra ``gs``), with
    the usual credentials of its clients from the environment; null is ``checkpoints`` in the run folder."""
    cache_folder: str | None = None
    """With an object store: folder of this node into which policies are pulled, once for all its processes; null is
    ``checkpoints`` in the run folder."""
    cache_policies: int = Field(default=3, ge=1)
    """With an object store: pulled policies that a node keeps in addition to those used in the last ten minutes."""
    parallel_transfers: int = Field(default=8, ge=1, le=64)
    """With an object store: files of one policy or state that a process transfers at once."""
    object_store: dict[str, Any] = Field(default_factory=dict)
    """With an object store: options of its fsspec file system, for example {"endpoint_url": "https://minio:9000"}."""
    keep_last: int = Field(default=6, ge=2)
    """Number of published policies to keep; pinned policies and those in use are kept too."""
    state_every_steps: int = Field(default=1, ge=1)
    """Train steps between two commits of the trainer state; steps in between are replayed after a crash. Must be 1 with
    trainer.algorithm.old_logprobs=stage_end."""
    secret: SecretStr | None = None
    """HMAC key of the manifests; null creates one per run, in the run folder."""

    @property
    def remote(self) -> bool:
        """True when ``folder`` is an object store."""
        return self.folder is not None and "://" in self.folder

    @model_validator(mode="after")
    def _the_folder_is_one_that_is_known(self) -> Self:
        if self.remote and not str(self.folder).startswith(OBJECT_STORES):
            raise ValueError(
                f"checkpoints.folder={self.folder}: expected a folder, or one of {', '.join(OBJECT_STORES)}"
            )
        if self.object_store and not self.remote:
            raise ValueError(
                f"checkpoints.object_store is for object stores only, not for checkpoints.folder={self.folder}"
            )
        for name in ("key", "secret", "token", "password"):
            if name in self.object_store:
                raise ValueError(
                    f"checkpoints.object_store.{name}: credentials do not belong in a run file; set them in the "
                    "environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...)"
                )
        return self


class EvalConfig(Section):
    """Evaluation of one pinned version, with a separate quota; its answers are never trained on."""

    every_versions: int = Field(default=0, ge=0)
    """Interval of evaluations during the run, in policy versions; 0 evaluates only before and after. One generator
    serves the version during an evaluation, and the others load new versions. With a single generator, the staleness
    bound may delay training."""
    prompt_count: int = Field(default=256, ge=1)
    """Number of prompts of one evaluation, the same each time."""
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
    """Local processes of a run."""

    rollout_replicas: int = Field(default=1, ge=1)
    """Number of rollout worker processes."""
    reward_replicas: int = Field(default=1, ge=1)
    """Number of reward services."""
    trainer_processes: int = Field(default=1, ge=1)
    """Number of trainer ranks; more than one starts torchrun with FSDP2."""
    torch_threads: int = Field(default=1, ge=1)
    """OMP threads per process."""
    restart_limit: int = Field(default=20, ge=0)
    """Restarts of one process within ten minutes of its running time before the run fails; its startup time does not
    count."""
    start_timeout_seconds: float = Field(default=300.0, gt=0)
    """Time limit for the publication of the initial policy, and again for a generator to serve it; large models need
    more."""
    host: str = "127.0.0.1"
    """Address to which the local services bind."""


class TelemetryConfig(Section):
    """Logs, traces and trackers."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of written lines."""
    log_format: Literal["console", "json"] = "json"
    """Format of the service logs."""
    otlp_endpoint: str | None = None
    """Address of an OpenTelemetry collector (OTLP over HTTP), for example http://collector:4318; null disables tracing.
    Requires the extra ``tracing``."""
    trace_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of trajectories and train steps that are traced; every service samples the same ones."""
    trackers: list[Literal["tensorboard", "wandb"]] = Field(default_factory=list)
    """Trackers in addition to metrics.jsonl (extras of the same name)."""
    tracker_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the trackers, for example {"wandb": {"project": "mine"}}."""
