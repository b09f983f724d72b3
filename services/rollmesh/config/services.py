"""Sections of the processes: addresses, access to ports, page and APIs, local processes, logs and traces."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rollmesh.config.section import Secret, Section, one_error

TrainerProcesses = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"], one_error("a whole number of processes from 1 on, or auto")
]


class NetworkConfig(Section):
    """Addresses of one service process.

    The defaults are for a run on one machine; pods set them with environment variables (ROLLMESH_NETWORK__...).
    ``rollmesh up`` starts many processes from one run file, so it always picks free ports.
    """

    host: str | None = None
    """Address to bind to, for example 0.0.0.0 or ::; null is launcher.host."""
    grpc_port: int = Field(default=0, ge=0, le=65535)
    """Port of the gRPC server; 0 picks a free one."""
    admin_port: int = Field(default=0, ge=0, le=65535)
    """Port of /metrics, /healthz and /readyz; 0 picks a free one."""
    advertise_host: str | None = None
    """Name or address under which other services reach this process, for example the pod's IP; null is the bound host,
    which then must not be a wildcard."""
    instance: str | None = Field(default=None, min_length=1, max_length=253)
    """Name of this process in logs and in the registry, for example the pod's name; null is <service>-<index>."""
    shared_folder: bool = True
    """Whether all services share this run folder. Set false in pods: each service then requires those of
    reward.address, store.url, checkpoints.folder and checkpoints.secret that it uses, and fails at startup without
    them."""


class TlsConfig(Section):
    """Mutual TLS on every port of the services; enabled by all three files, disabled without them."""

    certificate: str | None = None
    """PEM file: certificate of this process with its intermediate certificates, for servers and clients."""
    key: str | None = None
    """PEM file: private key of the certificate, without a passphrase."""
    ca: str | None = None
    """PEM file: authority that signs every certificate of the mesh; several while the authority is replaced."""
    server_name: str = Field(default="rollmesh", min_length=1)
    """DNS name in every certificate of the mesh. Clients check it instead of the address, because services connect to
    addresses of pods, which are unknown when a certificate is signed."""

    @property
    def enabled(self) -> bool:
        """True when the ports use TLS."""
        return self.certificate is not None

    @model_validator(mode="after")
    def _all_files_or_none(self) -> Self:
        missing = [name for name in ("certificate", "key", "ca") if getattr(self, name) is None]
        if missing and len(missing) < 3:
            raise ValueError(f"security.tls needs certificate, key and ca together; missing: {', '.join(missing)}")
        return self


class SecurityConfig(Section):
    """Access to the ports of the services."""

    tls: TlsConfig = Field(default_factory=TlsConfig)
    """Mutual TLS."""
    token: Secret = None
    """Bearer token of the mesh's gRPC and admin ports; preferably from ROLLMESH_SECURITY__TOKEN or ``token_file``."""
    token_file: str | None = None
    """File with the bearer token, read again after a change. With several lines, clients send the first token and
    servers accept all of them, so that the token can be changed while the mesh runs."""

    open_metrics: bool = False
    """Whether /metrics of the admin ports is open without certificate and token. ``rollmesh up`` enables it for a run
    whose token it generates."""

    @model_validator(mode="after")
    def _one_source_of_the_token(self) -> Self:
        if self.token is not None and self.token_file is not None:
            raise ValueError("security.token and security.token_file are both set: set only one of them")
        if self.token is not None and not self.token.get_secret_value().strip():
            raise ValueError("security.token is empty: set a token, or leave the field out")
        return self


class GatewayConfig(Section):
    """Page and REST API of a run."""

    enabled: bool = True
    """Whether the launcher starts a gateway; ``rollmesh gateway`` starts one in any case."""
    host: str | None = None
    """Address to bind to; null is network.host, else launcher.host. On a non-loopback address every client can read
    (not act): see ``token_for_reads``, and use a TLS proxy or set security.tls."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port to bind to; 0 picks a free one, which ``rollmesh status`` prints."""
    token: Secret = None
    """Bearer token of the actions (pause, pin, roll back, replay, scale), the run file and the logs of the processes on
    the page, and every call of the agents service; null creates one per run, in the run folder. Preferably from
    ROLLMESH_GATEWAY__TOKEN."""
    token_for_reads: bool = False
    """Require the token for reads too."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Accepted host names of requests ("*.example.org" for all subdomains). Empty accepts every name, or only loopback
    names when bound to loopback, which protects against DNS rebinding by other web pages."""
    sample_seconds: float = Field(default=1.0, ge=0.2, le=60)
    """Interval between two reads of the mesh, which is the maximum age of the displayed values."""
    timeline_rollouts: int = Field(default=1000, ge=16, le=16_384)
    """Maximum number of rollouts that are tracked individually; the rest are only counted."""
    most_event_clients: int = Field(default=64, ge=1, le=1024)
    """Maximum number of clients that follow the live events at once."""
    max_request_bytes: int = Field(default=8 << 20, ge=1 << 10)
    """Maximum size of a request body, for the gateway and the agents service."""

    @model_validator(mode="after")
    def _a_token_is_no_empty_word(self) -> Self:
        if self.token is not None and len(self.token.get_secret_value().strip()) < 8:
            raise ValueError("gateway.token is shorter than 8 characters: set a longer one, or leave the field out")
        return self


class AgentsConfig(Section):
    """OpenAI-compatible API of a run; its token, host names and body limit are those of the gateway section."""

    enabled: bool | None = None
    """Whether the launcher starts the service; null starts it with rollout.program=agent only. ``rollmesh agents``
    starts one in any case."""
    host: str | None = None
    """Address to bind to; null is gateway.host, else network.host, else launcher.host."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port to bind to; 0 picks a free one, which ``rollmesh status`` prints. Set one for clients that must find the
    service again after a restart."""
    renderer: str = "auto"
    """Format of chat, by the package ``renderers``: a model family (qwen3, glm-4.5, llama-3, gpt-oss, ...), whose tools
    and thoughts are read out of the sampled tokens; auto: the family that writes what the model's chat template writes,
    if there is one; template: the chat template alone."""
    renderer_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the renderer, such as ``thinking_retention: all``."""
    tool_parser: str | None = None
    """Parser of tool calls where no renderer knows the model: qwen3 (``<tool_call>`` with JSON), qwen3.5, glm or
    deepseek-v3."""

    @model_validator(mode="after")
    def _options_are_of_one_renderer(self) -> Self:
        if self.renderer_options and self.renderer in ("auto", "template"):
            raise ValueError(f"renderer_options: of no renderer with renderer={self.renderer}; name the model's family")
        return self


class LauncherConfig(Section):
    """Local processes of a run."""

    rollout_replicas: int = Field(default=1, ge=1)
    """Number of rollout worker processes."""
    reward_replicas: int = Field(default=1, ge=1)
    """Number of reward services."""
    agents_replicas: int = Field(default=1, ge=1)
    """Number of agents services of a run that has them; number i, from 0 on, binds agents.port + i if that is set."""
    trainer_processes: TrainerProcesses = 1
    """Number of trainer ranks; more than one starts torchrun with FSDP2. auto: the ranks and threads with the fastest
    train step on the cores of this machine that no generator decodes on, measured before the first start."""
    torch_threads: int = Field(default=1, ge=1, le=1024)
    """OMP threads per process on this machine; in a cluster, threads of a generator with the engine torch on a CPU."""
    restart_limit: int = Field(default=20, ge=0)
    """Restarts of one process within ten minutes of its running time before the run fails; its startup time does not
    count."""
    start_timeout_seconds: float = Field(default=300.0, gt=0)
    """Time limit for the publication of the initial policy, and again for a generator to serve it; large models need
    more. Also the time for which no generator may serve an evaluated version, or all may refuse the newest one."""
    host: str = "127.0.0.1"
    """Address to which the local services bind."""

    @property
    def least_trainer_processes(self) -> int:
        """Number of trainer ranks; the least of a measured one."""
        return 1 if self.trainer_processes == "auto" else self.trainer_processes


class TelemetryConfig(Section):
    """Logs, traces and trackers."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of written lines."""
    log_format: Literal["console", "json"] = "json"
    """Format of the service logs."""
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s/]+")
    """Address of an OpenTelemetry collector (OTLP over HTTP), for example http://collector:4318; null disables tracing.
    Requires the extra ``tracing``."""
    trace_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of trajectories and train steps that are traced; every service samples the same ones."""
    trackers: list[Literal["tensorboard", "wandb"]] = Field(default_factory=list)
    """Trackers in addition to metrics.jsonl (extras of the same name)."""
    tracker_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the trackers, for example {"wandb": {"project": "mine"}}."""
