"""The leader's part of rounds: first rounds of new groups, and decisions on groups whose round has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollmesh.curriculum.round_rules import RoundDecision, RoundRules
from rollmesh.group_outcome import GroupOutcome
from rollmesh.mesh import MeshView
from rollmesh.prompt_history import domain_record
from rollmesh.runtime.logging import get_logger
from rollmesh.store import NewGroup, TrajectoryStore

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
