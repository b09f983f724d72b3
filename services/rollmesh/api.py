"""The mesh as a library: its learner, engine, methods, scheduler and simulator in one process, without services.

    prompts -> Sampler.groups -> score -> train -> Sampler.update

All of it is the code of the mesh, so a method behaves as in a run. ``docs/library.md`` has examples.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from torch import Tensor

from rollmesh.algorithms.advantages import TrajectoryColumns
from rollmesh.algorithms.losses import LossInput, TokenLoss
from rollmesh.config import RunConfig
from rollmesh.config.generator import GeneratorConfig
from rollmesh.config.load import load_run_config
from rollmesh.config.recipes import resolve_model
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.mesh import Decisions, MeshView
from rollmesh.reward.scored_answer import answer_marker, answer_text, prompt_metadata
from rollmesh.scheduling import Schedule, decide, needs_groups
from rollmesh.segments import given_answer, join_segments
from rollmesh.sim.figures import Figures, figures
from rollmesh.sim.simulated_mesh import SimulatedMesh
from rollmesh.sim.simulation_setup import SimulationSetup, mesh_settings
from rollmesh.tasks.verifiers.verifier_protocol import BUILT_IN, RewardParts, build_verifier, checked_reward
from rollmesh.text import Tokenizer
from rollmesh.trainer.learner.method_binding import bind_advantage, loss_recipe
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.learner.step_report import StepReport
from rollmesh.trainer.learner.train_batch import build_train_batch, trajectory_columns
from rollmesh.types import (
    Batch,
    GenerationCall,
    Group,
    OutcomeKind,
    Prompt,
    RewardOutcome,
    SamplingParams,
    Segment,
    Trajectory,
)
from rollmesh.wire.reward_messages import ScoreItem

__all__ = [
    "Decisions", "Figures", "Group", "LossInput", "MeshView", "PolicyTrainer", "Prompt", "Sampler", "Schedule",
    "StepReport", "TokenLoss", "Tokenizer", "Trajectory", "advantages", "build_verifier", "decide",
    "given_advantage", "given_answer", "load_learner", "load_run_config", "loss", "needs_groups", "score", "simulate",
    "train",
]  # fmt: skip

T = TypeVar("T")


def load_learner(model: str | Path, *, device: str = "auto", longest: int = 0, **settings: Any) -> PolicyTrainer:
    """Load a Hugging Face folder, or ``recipe:NAME``, with the trainer's learner. Policy versions count train steps.

    ``settings`` are fields of the run file's section trainer, for example ``algorithm={"loss": "gspo"}``; ``longest``
    is the length for which packing is checked. Raises ConfigError, CheckpointError or pydantic's ValidationError.
    """
    config = TrainerConfig(**settings)
    return PolicyTrainer(resolve_model(str(model)), config, device=device, longest=longest)


class Sampler(AbstractContextManager["Sampler"]):
    """The embedded engine with the weights of a learner; a context manager. Calls block, also in a notebook's cell."""

    def __init__(self, learner: PolicyTrainer, tokenizer: Tokenizer, **settings: Any) -> None:
        """Start the engine; ``settings`` are fields of the run file's section generator, for example ``slots=32``."""
        self.tokenizer = tokenizer
        self._learner = learner
        self._files = TemporaryDirectory(prefix="rollmesh-policies-")
        self._drawn = 0
        self._loop = asyncio.new_event_loop()  # of its own: a notebook's loop runs already
        self._thread = threading.Thread(target=self._loop.run_forever, name="sampler", daemon=True)
        self._thread.start()
        self._engine = TorchEngine(GeneratorConfig(**settings))
        self._run(self._engine.start(self._exported(), learner.train_step))

    def groups(
        self, prompts: Sequence[Prompt], members: int, *, max_new_tokens: int, temperature: float = 1.0, seed: int = 0
    ) -> list[Group]:
        """Sample ``members`` answers to each prompt, unscored, with the log-probability of every token."""
        sampling = SamplingParams(temperature=temperature, seed=seed, stop_token_ids=self.tokenizer.eos_token_ids)
        first, self._drawn = self._drawn, self._drawn + len(prompts)

        async def group(index: int, prompt: Prompt) -> Group:
            answers = [self._answer(prompt, f"g{index}", m, max_new_tokens, sampling) for m in range(members)]
            answered = tuple(await asyncio.gather(*answers))
            return Group(group_id=f"g{index}", admission_index=index, trajectories=answered)

        async def every() -> list[Group]:
            return await asyncio.gather(*(group(first + i, prompt) for i, prompt in enumerate(prompts)))

        return self._run(every())

    async def _answer(
        self, prompt: Prompt, group_id: str, member: int, longest: int, sampling: SamplingParams
    ) -> Trajectory:
        call = GenerationCall(
            trajectory_id=f"{group_id}.{member}",
            context_ids=prompt.token_ids,
            prompt_token_count=len(prompt.token_ids),
            max_new_token_count=longest,
            sampling=sampling,
            chunk_token_count=longest,
        )
        chunks = [chunk async for chunk in self._engine.generate(call)]
        segments = [
            Segment(
                token_ids=chunk.token_ids,
                behavior_logprobs=chunk.behavior_logprobs,
                policy_version=chunk.policy_version,
                kv_min_version=chunk.kv_min_version,
                temperature=sampling.temperature,
                kept_sets=chunk.kept_sets,
            )
            for chunk in chunks
        ]
        answer = Trajectory(trajectory_id=call.trajectory_id, group_id=group_id, member_index=member, prompt=prompt)
        return replace(answer, segments=join_segments(segments), finish_reason=chunks[-1].finish_reason)

    def update(self) -> None:
        """Swap to the learner's present weights."""
        self._run(self._engine.load(self._exported(), self._learner.train_step, OnNewVersion.INTERRUPT))

    def __exit__(self, *_: object) -> None:
        """Stop the engine and delete its files."""
        self._run(self._engine.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._files.cleanup()

    def _exported(self) -> Path:
        folder = Path(self._files.name) / str(self._learner.train_step)
        self._learner.export(folder)
        return folder

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def score(groups: Sequence[Group], verify: Callable[..., float | RewardParts], tokenizer: Tokenizer) -> list[Group]:
    """Return the groups with their rewards by ``verify(response, metadata of the prompt)``, of a verifier or yours.

    It gets what a run's verifier gets: of a model that thinks the answer, and the prompt if it has ``needs_prompt``.
    """
    verifier: Any = getattr(verify, "__self__", verify)
    marker = answer_marker(tokenizer, None, {})
    built_in = (name for name, row in BUILT_IN.items() if row.target.endswith(f":{type(verifier).__name__}"))
    name = next(built_in, "")

    def scored(answer: Trajectory) -> Trajectory:
        item = ScoreItem(
            trajectory_id=answer.trajectory_id,
            prompt=answer.prompt,
            response_ids=answer.response_ids,
            finish_reason=answer.finish_reason,
        )
        response = answer_text(item, tokenizer, marker, name)
        reward = checked_reward(verify(response, prompt_metadata(answer.prompt, verifier, tokenizer)), "verifier")
        outcome = RewardOutcome(kind=OutcomeKind.SCORED, value=reward.value, parts=reward.parts)
        return replace(answer, outcome=outcome, shaped_reward=reward.value)

    return [replace(group, trajectories=tuple(map(scored, group.trajectories))) for group in groups]


def train(learner: PolicyTrainer, groups: Sequence[Group]) -> StepReport:
    """Train one step on scored groups, whose policy versions are train steps, and return its report."""
    return learner.train(Batch(train_step=learner.train_step + 1, groups=tuple(groups)), _versions(groups))


def _versions(groups: Sequence[Group]) -> dict[int, int]:
    return {v: v for group in groups for answer in group.trajectories for v in answer.policy_versions}


def given_advantage(data: TrajectoryColumns) -> Tensor:
    """Return the rewards: ``algorithm={"advantage": "rollmesh.api:given_advantage"}`` is for a ``given_answer``."""
    return data.rewards


def advantages(groups: Sequence[Group], name: str, **options: Any) -> Tensor:
    """Compute an advantage that needs no forward pass; float64 [trajectories], in the order of the groups."""
    versions = _versions(groups)
    batch = Batch(train_step=1 + max(versions), groups=tuple(groups))
    bound = bind_advantage(AlgorithmConfig(advantage=name, advantage_options=options))
    return bound.compute(trajectory_columns(build_train_batch(batch, versions, None)))


def loss(data: LossInput, name: str, **algorithm: Any) -> TokenLoss:
    """Compute a loss per token; ``algorithm`` are fields of trainer.algorithm, for example ``clip_high=0.28``."""
    recipe = loss_recipe(AlgorithmConfig(loss=name, **algorithm))
    return recipe.loss(data, recipe.options)


def simulate(config: RunConfig, **setup: Any) -> Figures:
    """Simulate a run on a virtual clock; ``setup`` has devices and lengths, as ``rollmesh sim`` (docs/simulator.md)."""
    settings = mesh_settings(config, SimulationSetup(**setup))
    return figures(SimulatedMesh(settings).run(), settings.devices)
