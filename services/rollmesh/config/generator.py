"""Generator section: the engine and its sizes, and the SGLang server with the engine's rules for other fields.

It has them because the run file is validated before any engine is imported, and ``config`` imports no engine.
"""

from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from rollmesh.config.section import EngineSection, Secret, Section

_OWN_FLAGS = frozenset(
    {
        "--model-path", "--model", "--host", "--port", "--api-key", "--admin-api-key", "--skip-tokenizer-init",
        "--weight-version", "--context-length", "--config", "--max-running-requests", "--max-total-tokens", "--dtype",
        "--device", "--enable-lora", "--lora-strict-loading", "--max-lora-rank", "--max-loras-per-batch",
        "--max-loaded-loras", "--lora-target-modules", "--lora-paths",
    }
)  # fmt: skip
_STARTED_ONLY = ("python", "arguments", "environment")
_EXACT_DRAFTS = ("EAGLE3", "EAGLE", "NEXTN", "FROZEN_KV_MTP")
"""SGLang's EAGLE-3 and multi-token prediction, which has the last three names."""
_THRESHOLD_FLAGS = ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc")

ARGMAX_DEVICES = (
    "elsewhere an SGLang server verifies drafts by argmax at any temperature, so log-probabilities are of tokens that "
    "were never sampled"
)


def speculation_problem(algorithm: str, thresholds: Sequence[object]) -> str:
    """Say why these drafts of an SGLang server change what it samples; empty if they do not."""
    name = algorithm.upper()
    if name == "NGRAM":
        return (
            "NGRAM drafts from the answers to all prompts, and its source pads drafts with copies of token 0, which "
            "the server then samples more often than its log-probability says"
        )
    if name and name not in _EXACT_DRAFTS:
        return f"{algorithm} is not known to leave the sampled tokens as they are; known are EAGLE3, EAGLE and NEXTN"
    if name and any(str(threshold) not in ("1", "1.0") for threshold in thresholds):
        return (
            f"with {' and '.join(_THRESHOLD_FLAGS)} other than 1 the server keeps drafts more often than it would "
            "sample them, so log-probabilities are of tokens that were never sampled"
        )
    return ""


class SglangConfig(EngineSection):
    """The SGLang server behind ``generator.engine: sglang``."""

    rollout_defaults: ClassVar[Mapping[str, Any]] = {"partial_save_tokens": 1024}
    """A save ends a slice of a call, which costs a server some milliseconds."""

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
    admin_key: Secret = None
    """Key of the server's endpoints. null creates a key per process for a started server, and sends none to a server at
    ``url``. Preferably from ROLLMESH_GENERATOR__SGLANG__ADMIN_KEY."""

    @model_validator(mode="after")
    def _the_server_is_started_or_found(self) -> Self:
        if self.url is not None:
            if not self.url.startswith(("http://", "https://")):
                raise ValueError(f"url={self.url}: expected http:// or https://")
            if self.url.startswith("http://") and _is_public(self.url):
                raise ValueError(
                    f"url={self.url}: HTTP would send the key and every token unencrypted over a "
                    "public network; use https://, or a private address"
                )
            for name in _STARTED_ONLY:
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is for a server that rollmesh starts; "
                        f"url={self.url} is a running server; leave one of the two out"
                    )
        return self

    @model_validator(mode="after")
    def _flags_have_one_owner(self) -> Self:
        for argument in self.arguments:
            flag = argument.split("=", 1)[0]
            # The server accepts abbreviations: --hos is --host.
            owns = sorted(own for own in _OWN_FLAGS if own.startswith(flag)) if len(flag) > 2 else []
            if flag.startswith("--") and owns:
                raise ValueError(f"arguments: {flag} ({owns[0]}) is set by rollmesh from the run file; leave it out")
        return self

    @model_validator(mode="after")
    def _drafts_leave_the_tokens_as_they_are(self) -> Self:
        thresholds = [self._value((flag,), "1") for flag in _THRESHOLD_FLAGS]
        if reason := speculation_problem(self._speculation, thresholds):
            raise ValueError(f"arguments: --speculative-algorithm {self._speculation}: {reason}")
        return self

    @property
    def data_parallel_size(self) -> str:
        """Value of --dp-size in ``arguments``; 1 if they do not set it."""
        return self._value(("--dp-size", "--data-parallel-size"), "1")

    @property
    def _speculation(self) -> str:
        return self._value(("--speculative-algorithm",), "")

    def _value(self, names: Sequence[str], default: str) -> str:
        """Return the last value of a flag in ``arguments``."""
        found = default
        for argument, following in zip(self.arguments, [*self.arguments, ""][1:], strict=True):
            flag, _, value = argument.partition("=")
            # The server accepts abbreviations.
            if len(flag) > 3 and any(name.startswith(flag) for name in names):
                found = value or following
        return found

    def problem(self, field: str, value: Any) -> str:
        server = f"the server at sglang.url={self.url}"
        if field == "pace" and value is not None:
            return "for engine=torch only; leave it out with engine=sglang"
        if field == "cuda_graphs" and value:
            return "for engine=torch only; leave it out, an SGLang server captures its graphs"
        if field == "speculation" and value != "off":
            return "for engine=torch only; an SGLang server drafts by flags in sglang.arguments; set off"
        if self.url is not None and field == "replicas" and value > 1:
            return f"generators cannot share {server}, because each loads policies into its server; set 1"
        if self.url is not None and field == "device" and value != "auto":
            return f"{server} has chosen its device; set auto"
        if self._speculation and field == "device" and value != "cuda":
            return f"--speculative-algorithm {self._speculation} needs cuda: {ARGMAX_DEVICES}"
        return ""


def _is_public(url: str) -> bool:
    """Tell whether the host of a URL is a public IP address; host names are not resolved."""
    try:
        return ip_address(urlsplit(url).hostname or "").is_global
    except ValueError:
        return False


ENGINE_SECTIONS: Mapping[str, type[EngineSection]] = {"torch": EngineSection, "sglang": SglangConfig}
"""Section of each engine: the field of ``GeneratorConfig`` with the engine's name; the torch engine has none."""


class GeneratorConfig(Section):
    """Generation."""

    replicas: int = Field(default=1, ge=0)
    """Generator processes that the launcher starts."""
    engine: Literal["torch", "sglang"] = "torch"
    """torch: the embedded engine; sglang: an SGLang server, see ``sglang``, with rollout.partial_save_tokens=1024 by
    default."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engine; auto leaves the choice to the engine, which uses CUDA when available."""
    slots: int = Field(default=64, ge=1, le=65_536)
    """Maximum number of calls that one generator decodes at once."""
    max_context_tokens: int = Field(default=2048, ge=2)
    """Maximum length of prompt plus response; longer requests are rejected."""
    kv_token_capacity: int | None = Field(default=None, ge=1)
    """Tokens of KV cache; null is slots * max_context_tokens."""
    on_new_version: Literal["interrupt", "keep_kv", "drain", "next_slice"] = "interrupt"
    """Effect of a new policy version on running calls. next_slice is for adapters, and the only value and the default
    with model.adapter: nothing pauses, running calls finish on their version, later ones use the new one."""
    reload_at_once: int | None = Field(default=None, ge=1)
    """Generators that load a new version at the same time (DART: 1); the others serve their old version until it is
    their turn. null: no limit. A generator that may not keep its version loads at once: it starts, is pinned, or its
    version is older than new trajectories may start on."""
    reload_every_versions: int = Field(default=1, ge=1)
    """k: generators load the newest version once k versions have passed a multiple of k; saves reloads, costs up to
    k - 1 steps of staleness. A version that new trajectories need, the last one and a pinned one are loaded always."""
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
    speculation: Literal["off", "history"] = "off"
    """engine=torch: history drafts the next tokens of a call from earlier responses to its prompt, and one wide decode
    step verifies them: the same tokens in fewer steps. It pays while few calls run and responses repeat earlier ones;
    elsewhere it is off by itself."""
    sglang: SglangConfig = Field(default_factory=SglangConfig)
    """SGLang server."""

    @property
    def engine_section(self) -> EngineSection:
        """Section of ``engine``, with its rules for the other fields."""
        section: EngineSection = getattr(self, self.engine, EngineSection())
        return section

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV cache of one generator."""
        return self.kv_token_capacity or self.slots * self.max_context_tokens

    @model_validator(mode="after")
    def _the_engine_can_do_it(self) -> Self:
        for name in type(self).model_fields:
            if reason := self.engine_section.problem(name, getattr(self, name)):
                raise ValueError(f"generator.{name}={getattr(self, name)}: {reason}")
        return self

    @model_validator(mode="after")
    def _a_pace_is_one_token_a_step(self) -> Self:
        if self.pace is not None and self.speculation != "off":
            raise ValueError(
                f"generator.speculation={self.speculation}: generator.pace has the seconds of steps of one token a "
                "call; set off, or leave generator.pace out"
            )
        return self

    @model_validator(mode="after")
    def _the_cache_holds_one_call(self) -> Self:
        if self.kv_tokens < self.max_context_tokens:
            raise ValueError(
                f"generator.kv_token_capacity={self.kv_token_capacity} does not hold one call of "
                f"generator.max_context_tokens={self.max_context_tokens}; increase it or leave it out"
            )
        return self
