"""Parts of the leader: evidence for its view, ranks and rounds of groups, due evaluations, reasons that end a run."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rollmesh.config.rollout import EvalConfig
from rollmesh.curriculum.planners import RoundDecision, RoundRules
from rollmesh.errors import Conflict, PoliciesRefused
from rollmesh.group_outcome import GroupOutcome
from rollmesh.mesh import EngineLoad, MeshView
from rollmesh.prompt_history import domain_record
from rollmesh.rollout.rollout_metrics import MeshMetrics
from rollmesh.runtime.logging import get_logger
from rollmesh.scheduling import Schedule, StartOrder
from rollmesh.scheduling.auto_pool import mean_cached_tokens
from rollmesh.scheduling.length_prediction import LengthEvidence, start_rank, weigh
from rollmesh.store import NewGroup, StoreCounts, TrajectoryStore
from rollmesh.store.drop_ledger import DeadLetters
from rollmesh.store.evaluation_requests import Evaluations, due_versions, evaluation_floor, evaluation_request
from rollmesh.types import GeneratorRecord
from rollmesh.worker.routing import refused_by_all


class PoolEvidence:
    """The newest evidence, read now and then; a fixed pool needs none."""

    def __init__(self, store: TrajectoryStore, schedule: Schedule) -> None:
        self._store = store
        self._is_needed = schedule.auto_pool
        self._engines: EngineLoad | None = None
        self._mean_cached_tokens: float | None = None

    async def measure(self, counts: StoreCounts) -> None:
        """Read the load of the generators, and take the finished lengths from ``counts``."""
        if self._is_needed:
            self._engines = engine_load(await self._store.generators.live())
            self._mean_cached_tokens = mean_cached_tokens(counts.finished_lengths)

    def forget(self) -> None:
        """Drop the evidence of an earlier lead: its counters are older than the stored bound."""
        self._engines = self._mean_cached_tokens = None

    def added_to(self, view: MeshView) -> MeshView:
        """Return the view with the evidence."""
        if not self._is_needed:
            return view
        return replace(view, engines=self._engines, mean_cached_tokens=self._mean_cached_tokens)


def engine_load(records: Sequence[GeneratorRecord]) -> EngineLoad | None:
    """Return the sums over the generators that serve or load a policy; None without one.

    A generator that drains before it loads soon serves again, so it still counts. Preemptions are summed over all
    generators: one that is out of service for a moment must not look like new preemptions when it returns.
    """
    able = [record for record in records if record.serving or record.loading_version is not None]
    if not able:
        return None
    return EngineLoad(
        slots=sum(record.slot_count for record in able),
        waiting=sum(record.waiting_count for record in able),
        kv_token_capacity=sum(record.kv_token_capacity for record in able),
        preemptions=sum(record.preemption_total for record in records),
    )


class StartRanking:
    """Ranks of groups before their admission; the evidence is read from the queue, so every leader finds the same."""

    def __init__(self, store: TrajectoryStore, schedule: Schedule, metrics: MeshMetrics) -> None:
        self._records = store.prompt_records
        self._measures = schedule.predicts_lengths
        self._ranks = schedule.start_order is StartOrder.LONGEST_EXPECTED
        self._metrics = metrics
        self._evidence = LengthEvidence()

    async def measure(self) -> None:
        """Measure again how well the history and the siblings predict lengths, and set their metrics."""
        if self._measures:
            self._evidence = weigh(await self._records.predictions())
            self._metrics.predicted(self._evidence, await self._records.size())

    async def ranked(self, groups: Sequence[NewGroup]) -> list[NewGroup]:
        """Return the groups with expected length and start rank; unchanged in admission order."""
        if not self._ranks:
            return list(groups)
        names = [group.record_name or group.prompt.prompt_id for group in groups]
        records = await self._records.read(names)
        return [
            self._rank(group, records[name].mean_tokens if name in records else None)
            for group, name in zip(groups, names, strict=True)
        ]

    def _rank(self, group: NewGroup, expected: float | None) -> NewGroup:
        return replace(group, expected_tokens=expected, start_rank=start_rank(expected, self._evidence))


_READS_PER_LOOK = 8
"""Reads of undecided groups after one view, so that the leader's other work does not wait for long."""


class RoundDecisions:
    """Applies the planner and the group shaper of a run. It remembers nothing, so any leader decides the same.

    Without rules it neither reads nor writes anything.
    """

    def __init__(self, store: TrajectoryStore, rules: RoundRules | None) -> None:
        self._store = store
        self._rules = rules
        self._log = get_logger("rounds")

    async def planned(self, groups: Sequence[NewGroup]) -> list[NewGroup]:
        """Return new groups with their first round. Raises DataError for a planner that fails."""
        if (rules := self._rules) is None:
            return list(groups)
        names = [group.record_name or group.prompt.prompt_id for group in groups]
        seen = await self._store.prompt_records.read(names)
        planned = []
        for group, name in zip(groups, names, strict=True):
            first = rules.first(seen.get(name))
            spare = first.launched - first.needed
            plan = rules.encode_plan(first)
            planned.append(replace(group, needed=first.needed, spare_members=spare, plan=plan))
        return planned

    async def decide(self, token: str, view: MeshView) -> bool:
        """Extend or close the undecided groups; returns True if there were any.

        Raises DataError for a planner or a group shaper that fails; its group stays undecided.
        """
        if self._rules is None or view.recovering or not view.undecided_groups:
            return False
        for _ in range(_READS_PER_LOOK):
            groups = await self._store.rounds.undecided()
            if not groups:
                break
            domains = {domain_record(group.domain) for group in groups if group.domain}
            names = domains.union(group.prompt_id for group in groups)
            records = await self._store.prompt_records.read(sorted(names))
            decided = [(group, self._rules.decide(group, records)) for group in groups]
            # Closings first: they let batches be cut, which frees the memory that an extension may lack.
            for group, decision in sorted(decided, key=lambda pair: pair[1].extension is not None):
                await self._apply(self._rules, token, group, decision)
        return True

    async def _apply(self, rules: RoundRules, token: str, group: GroupOutcome, decision: RoundDecision) -> None:
        if decision.is_bounded:
            self._log.warning("round_is_bounded", group=group.group_id, most_members=rules.most_members)
        rounds, extension, closing = self._store.rounds, decision.extension, decision.closing
        if extension is not None:
            plan = rules.encode_plan(extension)
            await rounds.extend(token, group, extension.needed, extension.launched, plan)
        elif closing is not None:
            await rounds.close(token, group, closing.shaped_rewards, closing.kept_tokens)


class PeriodicEvaluations:
    """Requests for versions k, 2k, ..., each made once across all leaders: the queue stores the requests."""

    def __init__(self, evaluations: Evaluations, config: EvalConfig, keep_last: int) -> None:
        self._evaluations = evaluations
        self._config = config
        self._keep_last = keep_last
        self._requested: int | None = None
        self._log = get_logger("leader")

    async def request_due(self, policy_version: int) -> None:
        """Request the evaluations due up to ``policy_version``, the newest; -1 before the first is announced."""
        every = self._config.every_versions
        # An empty Redis has no version until the trainer announces all of them again: evaluations do not start at -1.
        if every == 0 or policy_version < 0 or policy_version == self._requested:
            return
        if self._requested is None:
            # The newest version up to which an earlier leader has made its requests.
            known = [record.request.policy_version for record in await self._evaluations.all()]
            least = evaluation_floor(every, policy_version, self._keep_last)
            self._requested = max([least, *(version for version in known if version % every == 0)])
        for version in due_versions(every, self._requested, policy_version):
            try:
                await self._evaluations.request(evaluation_request(self._config, version))
            except Conflict as error:
                self._log.warning("evaluation_not_requested", policy_version=version, message=str(error))
        self._requested = policy_version

    def forget(self) -> None:
        """Drop the cached position: another replica may have led since, or the store may have lost requests."""
        self._requested = None


_NEWEST = 200
_MOST_CHARACTERS = 400
_VARIABLE = re.compile(r"\b[0-9a-f]{8,}\b|\d+")
"""Ids and numbers, in which equal reasons differ."""


class RefusedPolicies:
    """Rule that ends the run after a number of refused versions in a row, or a time with the same version."""

    def __init__(self, version_limit: int, seconds: float) -> None:
        self._version_limit = version_limit
        self._seconds = seconds
        self._refused_since: tuple[int, float] | None = None
        """Newest version, and the time since which every generator refuses it."""

    def judge(
        self, now: float, newest_version: int, generators: Sequence[GeneratorRecord], *, trains: bool = False
    ) -> PoliciesRefused | None:
        """Return the error that ends the run, or None. ``now`` is in monotonic seconds.

        The time does not count while the trainer ``trains``, because generators may accept the next version.
        """
        refusal = refused_by_all(newest_version, generators)
        if refusal is None:
            self._refused_since = None
            return None
        if trains or self._refused_since is None or self._refused_since[0] != newest_version:
            self._refused_since = (newest_version, now)
        if refusal.refused_count >= self._version_limit:
            reason = (
                f"{refusal.refused_count} versions in a row (generator.refused_versions_limit={self._version_limit})"
            )
        elif now - self._refused_since[1] >= self._seconds:
            reason = f"it for {self._seconds:.0f} s (launcher.start_timeout_seconds)"
        else:
            return None
        remedy = "roll back to an older version or lower trainer.learning_rate"
        if newest_version == 0:
            remedy = "it is the initial model: check the weights of model.path, and that the engine computes this model"
        return PoliciesRefused(
            f"every generator refuses policy version {newest_version} and has refused {reason}: "
            f"{refusal.refused_reason}; {remedy}"
        )


async def commonest_reason(letters: DeadLetters) -> str:
    """Return the commonest reason of the newest dead letters as the end of a sentence; empty without letters."""
    reasons = [" ".join(letter.reason.split()) for letter in await letters.newest(_NEWEST)]
    kinds = Counter(_VARIABLE.sub("#", reason) for reason in reasons)
    if not kinds:
        return ""
    kind, count = kinds.most_common(1)[0]
    example = next(reason for reason in reasons if _VARIABLE.sub("#", reason) == kind)
    return f"; {count} of the newest {len(reasons)} dead letters: {example[:_MOST_CHARACTERS]}"
