"""Evaluations: a fixed set of prompts answered by one pinned policy version, scored, never trained on.

Their trajectories bypass admission and the pool, and the mesh's trajectory counts exclude them. During an evaluation a
generator is pinned to the requested version (``evaluation_pin``); an answer counts only if this version sampled every
token. If no generator serves the version (its weights are pruned or refused), the evaluation ends without a score, so
that the run does not wait for it.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rollmesh.config import RunConfig
from rollmesh.config.rollout import EvalConfig
from rollmesh.errors import Conflict, RollmeshError, SessionLost, StoreUnavailable
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import cancel_and_wait, cancelled_awaits_as_errors
from rollmesh.store.queue_types import EXISTING_PROMPTS, REQUESTED_PROMPTS, DomainScore, EvalRequest, EvalResult
from rollmesh.tasks.sources.derived import run_prompts
from rollmesh.tasks.sources.source_protocol import PromptSource
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, OutcomeKind, SamplingParams, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.build import WorkerDeps
from rollmesh.worker.evaluation_pin import Pin
from rollmesh.worker.program import NobodyAnswers, RolloutContext

_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAnswer:
    """One scored answer of an evaluation."""

    prompt_index: int
    reward: float | None
    """Reward of the verifier; None if it returned no value."""
    token_count: int
    truncated: bool
    policy_versions: tuple[int, ...]
    domain: str = ""


def summarise(
    answers: Sequence[EvaluationAnswer], pinned_version: int, prompts: Mapping[str, float] | None = None
) -> EvalResult:
    """Compute mean reward, standard error, lengths and truncated share.

    The answers to one prompt are not independent, so the prompts are the sample: mean and standard error (sample
    standard deviation / sqrt(prompts)) are those of the prompts' mean rewards. ``prompts`` are further details, about
    the number of prompts.
    """
    counted = [a for a in answers if a.reward is not None and a.policy_versions == (pinned_version,)]
    n = len(counted)
    lengths = [a.token_count for a in counted]
    details = {
        "mean_length": sum(lengths) / n if n else 0.0,
        "max_length": float(max(lengths, default=0)),
        "truncated_share": sum(a.truncated for a in counted) / n if n else 0.0,
    }
    whole = _score(counted)
    return EvalResult(
        mean=whole["mean"],
        standard_error=whole["standard_error"],
        sample_count=n,
        discarded_count=len(answers) - n,
        details={**details, **(prompts or {})},
        domains={
            name: _score([a for a in counted if a.domain == name])
            for name in sorted({a.domain for a in counted} - {""})
        },
    )


def _score(answers: Sequence[EvaluationAnswer]) -> DomainScore:
    rewards: dict[int, list[float]] = {}
    for answer in answers:
        if answer.reward is not None:
            rewards.setdefault(answer.prompt_index, []).append(answer.reward)
    means = [fmean(of_prompt) for of_prompt in rewards.values()]
    error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return DomainScore(mean=fmean(means) if means else 0.0, standard_error=error, n=len(answers))


class Evaluator:
    """Loop that claims evaluation requests and completes them."""

    def __init__(
        self,
        deps: WorkerDeps,
        config: EvalConfig,
        *,
        budget: int,
        stop_token_ids: tuple[int, ...],
        open_prompts: Callable[[], PromptSource],
        section: str,
        unserved_seconds: float,
    ) -> None:
        """Create the evaluator of the worker with these ``deps``.

        The first evaluation calls ``open_prompts``; ``section`` is that of their source. An evaluation ends without a
        score once no generator has served its version for ``unserved_seconds``.
        """
        self._deps = deps
        self._budget = budget
        self._params = SamplingParams(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=config.seed,
            stop_token_ids=stop_token_ids,
        )
        self._open_prompts = open_prompts
        self._section = section
        self._unserved_seconds = unserved_seconds
        self._prompts: PromptSource | None = None
        self._log = get_logger("evaluation")

    async def run(self) -> None:
        """Run evaluations until cancelled; another worker runs an unfinished one again."""
        while True:
            try:
                request = await self._deps.session.call(self._deps.store.evaluations.claim)
                if request is not None:
                    await self._evaluate(request)
                    continue
            except (SessionLost, StoreUnavailable, Conflict) as error:
                self._log.warning("evaluation_failed", message=str(error))
            await asyncio.sleep(_LOOK_SECONDS)

    async def _evaluate(self, request: EvalRequest) -> None:
        self._log.info("evaluation_starts", evaluation=request.evaluation_id, policy_version=request.policy_version)
        self._deps.metrics.evaluations_started.inc()
        store = self._deps.store
        answers: list[EvaluationAnswer] = []
        pin = Pin(store, self._deps.generators, request, self._deps.health.waits)
        async with pin.held() as served:
            if served:
                answers = await self._answers_while_served(request, pin)
            else:
                self._give_up(request, "the policy version does not exist, or its weights are pruned")
        fewer = {}
        if self._prompts is not None and self._prompts.epoch_size < request.prompt_count:
            fewer = {REQUESTED_PROMPTS: request.prompt_count, EXISTING_PROMPTS: self._prompts.epoch_size}
        result = summarise(answers, request.policy_version, fewer)
        await store.evaluations.finish(self._deps.session.current, request.evaluation_id, result)
        self._deps.metrics.evaluations.inc()
        self._deps.metrics.last_evaluation.set_to_current_time()
        self._log.info(
            "evaluation_done",
            policy_version=request.policy_version,
            mean=round(result.mean, 4),
            standard_error=None if result.standard_error is None else round(result.standard_error, 4),
            n=result.sample_count,
            discarded=result.discarded_count,
        )

    async def _answers_while_served(self, request: EvalRequest, pin: Pin) -> list[EvaluationAnswer]:
        """Return the answers; none if no generator serves the version for too long."""
        answering = asyncio.create_task(self._answers(request, pin.slot_count))
        try:
            last_served = time.monotonic()
            while not (await asyncio.wait({answering}, timeout=min(_LOOK_SECONDS, self._unserved_seconds)))[0]:
                if pin.waits or self._served(request.policy_version):
                    last_served = time.monotonic()
                elif refusal := pin.refusal:
                    self._give_up(request, f"every generator that should serve it refuses it: {refusal}")
                    return []
                elif time.monotonic() - last_served > self._unserved_seconds:
                    unserved = f"no generator served it for {self._unserved_seconds:g} s"
                    self._give_up(request, f"{unserved}: its weights are pruned, or were refused")
                    return []
            return answering.result()
        except NobodyAnswers as error:
            self._give_up(request, str(error))
            return []
        finally:
            await cancel_and_wait(answering)

    def _give_up(self, request: EvalRequest, reason: str) -> None:
        self._deps.metrics.evaluations_given_up.inc()
        self._log.error("evaluation_given_up", policy_version=request.policy_version, message=reason)

    def _served(self, policy_version: int) -> bool:
        records = self._deps.generators.records.values()
        return any(record.serving and record.policy_version == policy_version for record in records)

    async def _answers(self, request: EvalRequest, concurrency: int) -> list[EvaluationAnswer]:
        if self._prompts is None:
            prompts = await asyncio.to_thread(self._open_prompts)
            await self._deps.store.leadership.check_content(self._section, prompts.content)
            self._prompts = prompts
        count = min(request.prompt_count, self._prompts.epoch_size)
        waiting = [(index, sample) for index in range(count) for sample in range(request.samples_per_prompt)]
        waiting.reverse()
        answers: list[EvaluationAnswer] = []

        async def answer_some() -> None:
            while waiting:
                index, sample = waiting.pop()
                answers.append(await self._answer(request, index, sample))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(waiting), concurrency)):
                    group.create_task(answer_some())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return answers

    async def _answer(self, request: EvalRequest, index: int, sample: int) -> EvaluationAnswer:
        assert self._prompts is not None
        # The trajectory's id keys the noise (engine torch). It excludes the version: every version gets the same noise.
        prompt = self._prompts.prompt(0, index)
        active = ActiveTrajectory(
            Trajectory(
                trajectory_id=f"eval-{index}.{sample}",
                group_id=f"eval-{index}",
                member_index=sample,
                prompt=prompt,
                birth_version=request.policy_version,
            )
        )
        rollout = RolloutContext(
            active=active,
            caller=self._deps.caller,
            params=self._params,
            budget=self._budget,
            save=_nothing,
            report_first_token=_nothing,
            restart=_restart,
            keep_snapshot=self._place_agent,
            pinned_version=request.policy_version,
        )
        try:
            with cancelled_awaits_as_errors():
                result = await self._deps.program.run(rollout)
                trajectory = active.result(result.reason)
                outcome = (await self._deps.scorer.score(trajectory, result.outcome)).outcome
                active.recorded = True
        except (StoreUnavailable, SessionLost, NobodyAnswers):
            raise
        except RollmeshError as error:
            self._log.warning("evaluation_answer_failed", prompt=prompt.prompt_id, message=str(error))
            return _failed(index, active)
        except Exception:  # an error in a user's program fails the answer, not the replica
            self._log.exception("evaluation_answer_failed", prompt=prompt.prompt_id)
            return _failed(index, active)
        finally:
            active.close()
        return EvaluationAnswer(
            prompt_index=index,
            reward=outcome.value if outcome.kind is OutcomeKind.SCORED else None,
            token_count=active.token_count + result.further_tokens,
            truncated=result.reason is FinishReason.LENGTH,
            policy_versions=trajectory.policy_versions,
            domain=prompt.domain,
        )

    async def _place_agent(self, active: ActiveTrajectory, snapshot: bytes, agent: str = "", *name: str) -> None:
        """Store where an agent's session is; answers and environments of an evaluation are not stored."""
        if agent:
            await self._deps.session.call(lambda session: self._deps.store.sessions.place_agent(session, agent))


def run_evaluator(config: RunConfig, deps: WorkerDeps, tokenizer: Tokenizer) -> Evaluator:
    """Return the evaluator of a run, for the process whose worker can run its program."""
    return Evaluator(
        deps,
        config.evaluation,
        budget=config.rollout.max_new_tokens,
        stop_token_ids=tokenizer.eos_token_ids,
        open_prompts=lambda: run_prompts(config, tokenizer, "eval"),
        section="data.source" if config.data.evaluation_source is None else "data.evaluation_source",
        unserved_seconds=config.launcher.start_timeout_seconds,
    )


def _failed(prompt_index: int, active: ActiveTrajectory) -> EvaluationAnswer:
    return EvaluationAnswer(
        prompt_index=prompt_index, reward=None, token_count=active.token_count, truncated=False, policy_versions=()
    )


async def _nothing(*_: object) -> None:
    """Save nothing: the answers of an evaluation are not stored."""


async def _restart(active: ActiveTrajectory) -> None:
    active.restart()
