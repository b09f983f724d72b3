"""The whole run file, and checks for invalid combinations of fields."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from rollmesh.config.agents import AgentsConfig
from rollmesh.config.data import DataConfig, RewardConfig, RolloutConfig
from rollmesh.config.gateway import GatewayConfig
from rollmesh.config.network import NetworkConfig
from rollmesh.config.schedule import ScheduleConfig
from rollmesh.config.section import Section
from rollmesh.config.security import SecurityConfig
from rollmesh.config.services import (
    CheckpointConfig,
    EvalConfig,
    GeneratorConfig,
    LauncherConfig,
    ModelConfig,
    StoreConfig,
    TelemetryConfig,
)
from rollmesh.config.trainer import DUAL_CLIP, TrainerConfig

SGLANG_SAVE_TOKENS = 1024


class RunConfig(Section):
    """Configuration of one run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")
    """Name of the run, used as prefix of its Redis keys and label of its metrics."""
    folder: str
    """Run folder: config, logs, metrics, plots, report, embedded Redis, checkpoints."""
    seed: int = 0
    """Seed of prompts, shuffling and sampling noise."""
    model: ModelConfig
    """The policy before training."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Prompts."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Program and limits of a rollout."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """Scoring."""
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """Admission and cut."""
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)
    """Generation."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """Optimization."""
    checkpoints: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Policies and trainer state."""
    store: StoreConfig = Field(default_factory=StoreConfig)
    """The trajectory queue."""
    evaluation: EvalConfig = Field(default_factory=EvalConfig)
    """Evaluation."""
    launcher: LauncherConfig = Field(default_factory=LauncherConfig)
    """Local processes."""
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    """Addresses of the services, and their discovery in pods."""
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    """Logs, traces and trackers."""
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    """Certificates and tokens of the services' ports."""
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    """The page and the REST API."""
    agents: AgentsConfig = Field(default_factory=AgentsConfig)
    """The OpenAI-compatible API."""

    @model_validator(mode="before")
    @classmethod
    def _sglang_saves_less_often(cls, data: Any) -> Any:
        """Set the default to ``SGLANG_SAVE_TOKENS``: a slice costs an SGLang server some milliseconds."""
        if not isinstance(data, dict):
            return data
        generator, rollout = data.get("generator"), data.get("rollout") or {}
        on_sglang = isinstance(generator, dict) and generator.get("engine") == "sglang"
        if on_sglang and isinstance(rollout, dict) and "partial_save_tokens" not in rollout:
            return {**data, "rollout": {**rollout, "partial_save_tokens": SGLANG_SAVE_TOKENS}}
        return data

    @model_validator(mode="before")
    @classmethod
    def _agents_are_not_evaluated(cls, data: Any) -> Any:
        """Disable evaluation by default for external agents, which the mesh cannot run."""
        if not isinstance(data, dict) or not isinstance(data.get("rollout"), dict):
            return data
        evaluation = data.get("evaluation") or {}
        if data["rollout"].get("program") != "agent" or not isinstance(evaluation, dict):
            return data
        return {**data, "evaluation": {"before_and_after": False, **evaluation}}

    @model_validator(mode="after")
    def _agents_evaluate_themselves(self) -> Self:
        wanted = self.evaluation.before_and_after or self.evaluation.every_versions > 0
        if self.rollout.program == "agent" and wanted:
            raise ValueError(
                f"evaluation.before_and_after={self.evaluation.before_and_after}, evaluation.every_versions="
                f"{self.evaluation.every_versions}: with rollout.program=agent the mesh cannot run the agent; set "
                "false and 0, and evaluate the agent through the agents service with the model RUN@VERSION"
            )
        return self

    @model_validator(mode="after")
    def _group_size_fits_the_advantage(self) -> Self:
        if self.schedule.group_size < 2:
            raise ValueError(
                f"schedule.group_size={self.schedule.group_size}: {self.trainer.algorithm.advantage} compares the "
                "members of a group, so it needs at least 2"
            )
        return self

    @model_validator(mode="after")
    def _stage_end_needs_a_barrier(self) -> Self:
        if self.trainer.algorithm.old_logprobs == "stage_end" and self.schedule.preset != "copris_paper":
            raise ValueError(
                "trainer.algorithm.old_logprobs=stage_end needs the barrier of schedule.preset=copris_paper, "
                f"not {self.schedule.preset}"
            )
        return self

    @model_validator(mode="after")
    def _stage_end_saves_every_step(self) -> Self:
        every = self.checkpoints.state_every_steps
        if self.trainer.algorithm.old_logprobs == "stage_end" and every != 1:
            raise ValueError(
                f"checkpoints.state_every_steps={every}: set 1 with trainer.algorithm.old_logprobs=stage_end, because "
                "the logprobs of a stage end are saved with the trainer state, and a replay cannot compute them again"
            )
        return self

    @model_validator(mode="after")
    def _corrections_need_a_trainer_side_source(self) -> Self:
        algorithm = self.trainer.algorithm
        if algorithm.loss in ("tis", "decoupled_ppo") and algorithm.old_logprobs == "sampler":
            raise ValueError(
                f"trainer.algorithm.loss={algorithm.loss} with trainer.algorithm.old_logprobs=sampler would correct "
                "nothing: its weight is old_logprobs over the behavior policy's, which sampler makes exactly 1; use "
                "old_logprobs=recompute, snapshot, current or (with schedule.preset=copris_paper) stage_end, or "
                "loss=ppo_clip"
            )
        return self

    @model_validator(mode="after")
    def _only_the_losses_of_ppo_have_a_dual_clip(self) -> Self:
        algorithm = self.trainer.algorithm
        # The default is allowed, because the resolved run file of every run contains it.
        if algorithm.loss in ("gspo", "cispo") and algorithm.dual_clip not in (None, DUAL_CLIP):
            raise ValueError(
                f"trainer.algorithm.dual_clip={algorithm.dual_clip:g}: trainer.algorithm.loss={algorithm.loss} has no "
                "dual clip and would ignore it; leave dual_clip out, or use loss=ppo_clip, decoupled_ppo or tis"
            )
        return self

    @model_validator(mode="after")
    def _recompute_refuses_mixed_caches(self) -> Self:
        recomputed = self.trainer.algorithm.old_logprobs in ("stage_end", "recompute", "snapshot")
        if recomputed and self.generator.on_new_version == "keep_kv":
            raise ValueError(
                f"trainer.algorithm.old_logprobs={self.trainer.algorithm.old_logprobs} cannot reproduce tokens that "
                "attended to another version's cache: use generator.on_new_version=interrupt or old_logprobs=sampler"
            )
        return self

    @model_validator(mode="after")
    def _context_holds_prompt_and_response(self) -> Self:
        need = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        if need > self.generator.max_context_tokens:
            raise ValueError(
                f"generator.max_context_tokens={self.generator.max_context_tokens} is less than data.max_prompt_tokens"
                f" + rollout.max_new_tokens = {need}"
            )
        return self

    @model_validator(mode="after")
    def _minibatches_split_the_batch(self) -> Self:
        if self.schedule.groups_per_batch % self.trainer.minibatches:
            raise ValueError(
                f"trainer.minibatches={self.trainer.minibatches} does not divide "
                f"schedule.groups_per_batch={self.schedule.groups_per_batch}"
            )
        return self
