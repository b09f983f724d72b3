"""Evaluations: a fixed set of prompts answered by one pinned policy version, scored, never trained on.

They live outside admission and pool: the mesh's trajectory counts do not know them. While one runs, a generator is
pinned to the version asked for (``pins``); an answer counts only if every token carries it. A version that no
generator comes to serve (its weights are pruned, or refused) ends without a score: a run must not wait for it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollmesh.config.services import EvalConfig
from rollmesh.errors import Conflict, RollmeshError, SessionLost, StoreUnavailable
from rollmesh.rollout.evaluation.pinned_generator import Pin
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.logging import get_logger
from rollmesh.store import TrajectoryStore
from rollmesh.store.queue_types import EvalRequest, EvalResult
from rollmesh.tasks.sources.source_protocol import PromptSource
from rollmesh.types import FinishReason, OutcomeKind, SamplingParams, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.generation_calls import Caller
from rollmesh.worker.generator_pool import GeneratorPool
from rollmesh.worker.programs import Program, RolloutContext
from rollmesh.worker.trajectory_scoring import TrajectoryScorer
from rollmesh.worker.worker_session import WorkerSession

_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAnswer:
    """One scored answer of an evaluation."""

    reward: float | None
    """None when the verifier gave no value."""
    token_count: int
    truncated: bool
    policy_versions: tuple[int, ...]


def summarise(answers: Sequence[EvaluationAnswer], pinned_version: int) -> EvalResult:
    """Mean reward, its standard error (sample standard deviation / sqrt(n)), lengths and truncated share."""
    counted = [a for a in answers if a.reward is not None and a.policy_versions == (pinned_version,)]
    rewards = [a.reward for a in counted if a.reward is not None]
    n = len(rewards)
    mean = sum(rewards) / n if n else 0.0
    variance = sum((r - mean) ** 2 for r in rewards) / (n - 1) if n > 1 else 0.0
    lengths = [a.token_count for a in counted]
    details = {
        "mean_length": sum(lengths) / n if n else 0.0,
        "max_length": float(max(lengths, default=0)),
        "truncated_share": sum(a.truncated for a in counted) / n if n else 0.0,
    }
    return EvalResult(
        mean=mean,
        standard_error=math.sqrt(variance / n) if n else 0.0,
        sample_count=n,
        discarded_count=len(answers) - n,
        details=details,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorDeps:
    """What an evaluator is made of."""

    store: TrajectoryStore
    session: WorkerSession
    caller: Caller
    generators: GeneratorPool
    scorer: TrajectoryScorer
    program: Program
    open_prompts: Callable[[], PromptSource]
    """Opens the evaluation prompts, once the first evaluation needs them."""
    unserved_seconds: float
    """How long a pinned version may be served by no generator before its evaluation is given up."""
    metrics: RolloutMetrics


class Evaluator:
    """Claims evaluation requests and answers them."""

    def __init__(
        self, parts: EvaluatorDeps, config: EvalConfig, *, budget: int, stop_token_ids: tuple[int, ...]
    ) -> None:
        self._parts = parts
        self._config = config
        self._budget = budget
        self._params = SamplingParams(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=config.seed,
            stop_token_ids=stop_token_ids,
        )
        self._prompts: PromptSource | None = None
        self._log = get_logger("evaluation")

    async def run(self) -> None:
        """Answer evaluations until cancelled; an unfinished one waits for another worker."""
        while True:
            try:
                request = await self._parts.session.call(self._parts.store.claim_evaluation)
                if request is not None:
                    await self._evaluate(request)
                    continue
            except (SessionLost, StoreUnavailable, Conflict) as error:
                self._log.warning("evaluation_failed", message=str(error))
            await asyncio.sleep(_LOOK_SECONDS)

    async def _evaluate(self, request: EvalRequest) -> None:
        self._log.info("evaluation_starts", evaluation=request.evaluation_id, policy_version=request.policy_version)
        self._parts.metrics.evaluations_started.inc()
        store = self._parts.store
        answers: list[EvaluationAnswer] = []
        pin = Pin(store, self._parts.generators, request)
        async with pin.held() as served:
            if served:
                answers = await self._answers_while_served(request, pin)
            else:
                self._give_up(request, "there is no such policy version, or its weights are pruned")
        result = summarise(answers, request.policy_version)
        await store.finish_evaluation(self._parts.session.current, request.evaluation_id, result)
        self._parts.metrics.evaluations.inc()
        self._parts.metrics.last_evaluation.set_to_current_time()
        self._log.info(
            "evaluation_done",
            policy_version=request.policy_version,
            mean=round(result.mean, 4),
            standard_error=round(result.standard_error, 4),
            n=result.sample_count,
            discarded=result.discarded_count,
        )

    async def _answers_while_served(self, request: EvalRequest, pin: Pin) -> list[EvaluationAnswer]:
        """The answers; none of them when the version is served by nobody for too long."""
        answering = asyncio.create_task(self._answers(request, pin.slot_count))
        try:
            last_served = time.monotonic()
            while not (await asyncio.wait({answering}, timeout=min(_LOOK_SECONDS, self._parts.unserved_seconds)))[0]:
                if pin.waits or self._served(request.policy_version):
                    last_served = time.monotonic()
                elif time.monotonic() - last_served > self._parts.unserved_seconds:
                    unserved = f"no generator served it for {self._parts.unserved_seconds:g} s"
                    self._give_up(request, f"{unserved}: its weights are pruned, or were refused")
                    return []
            return answering.result()
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    def _give_up(self, request: EvalRequest, reason: str) -> None:
        self._parts.metrics.evaluations_given_up.inc()
        self._log.error("evaluation_given_up", policy_version=request.policy_version, message=reason)

    def _served(self, policy_version: int) -> bool:
        records = self._parts.generators.records.values()
        return any(record.serving and record.policy_version == policy_version for record in records)

    async def _answers(self, request: EvalRequest, concurrency: int) -> list[EvaluationAnswer]:
        if self._prompts is None:
            self._prompts = await asyncio.to_thread(self._parts.open_prompts)
        count = min(request.prompt_count, self._prompts.epoch_size)
        waiting = [(index, sample) for index in range(count) for sample in range(request.samples_per_prompt)]
        waiting.reverse()
        answers: list[EvaluationAnswer] = []

        async def answer_some() -> None:
            while waiting:
                index, sample = waiting.pop()
                answers.append(await self._answer(request, index, sample))

        runners = min(len(waiting), concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(runners):
                    group.create_task(answer_some())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return answers

    async def _answer(self, request: EvalRequest, index: int, sample: int) -> EvaluationAnswer:
        assert self._prompts is not None
        # The noise is keyed by the trajectory's id. The version is not in it: every version meets the same noise.
        prompt = self._prompts.prompt(0, index)
        held = ActiveTrajectory(
            Trajectory(
                trajectory_id=f"eval-{index}.{sample}",
                group_id=f"eval-{index}",
                member_index=sample,
                prompt=prompt,
                birth_version=request.policy_version,
            )
        )
        rollout = RolloutContext(
            held=held,
            caller=self._parts.caller,
            params=self._params,
            budget=self._budget,
            save=_nothing,
            report_first_token=_nothing,
            restart=_restart,
            keep_snapshot=_no_snapshot,
            pinned_version=request.policy_version,
        )
        try:
            ending = await self._parts.program.run(rollout)
            trajectory = held.result(ending.reason)
            outcome = (await self._parts.scorer.score(trajectory, ending.outcome)).outcome
        except (StoreUnavailable, SessionLost):
            raise
        except RollmeshError as error:
            self._log.warning("evaluation_answer_failed", prompt=prompt.prompt_id, message=str(error))
            return EvaluationAnswer(reward=None, token_count=held.token_count, truncated=False, policy_versions=())
        except Exception:  # whatever a program of the user raises fails its answer, not the replica
            self._log.exception("evaluation_answer_failed", prompt=prompt.prompt_id)
            return EvaluationAnswer(reward=None, token_count=held.token_count, truncated=False, policy_versions=())
        return EvaluationAnswer(
            reward=outcome.value if outcome.kind is OutcomeKind.SCORED else None,
            token_count=held.token_count,
            truncated=ending.reason is FinishReason.LENGTH,
            policy_versions=trajectory.policy_versions,
        )


async def _nothing(_held: ActiveTrajectory) -> None:
    """Answers of an evaluation are not saved."""


async def _no_snapshot(_held: ActiveTrajectory, _snapshot: bytes) -> None:
    """Nor are their environments."""


async def _restart(held: ActiveTrajectory) -> None:
    held.restart()
