"""Comparison of the queue with the plain model: what it is made of, what the leader sees, every counter."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis.stateful import invariant

from rollmesh.store import TokenDigest

from .queue_workers import QueueWorkers, segments
from .stored_keys import read_truth

SERVER_TOTALS = {"recoveries", "reaped_sessions_total", "reasserted_groups_total"}
"""Lifetime counters of what the model leaves to the store."""
MEASURED = {"ready_seconds": 100.0, "update_seconds": 100.0, "ready_updates": 1.0}
"""Measured times, with the error that the real time of the steps may make; whole updates may be one more or less."""


class ComparedQueue(QueueWorkers):
    """Workers whose queue is compared with the model after every step."""

    cursor: int

    @invariant()
    def agree(self) -> None:
        """Whatever the queue is made of, what the leader sees of it and every counter are those of the model."""
        if hasattr(self, "store"):
            self.the_queue_agrees_with_the_model()
            self.the_view_agrees_with_the_model()
            self.the_counters_agree_with_the_model()
            self.the_history_agrees_with_the_model()

    def the_queue_agrees_with_the_model(self) -> None:
        truth = self.do(read_truth(self.store))
        assert truth.problems == []
        assert truth.groups == {
            gid: group.state for groups in self.model.groups.values() for gid, group in groups.items()
        }
        assert truth.undecided == self.model.undecided.keys()
        assert truth.tombstones == set(self.model.ended)
        in_groups = {
            m.trajectory_id for i in self.model.members if not self.model.is_gone((m := self.model.members[i]).group)
        }
        assert truth.members.keys() == in_groups
        assert truth.half_gone.keys() <= self.model.members.keys() - in_groups
        for trajectory_id, record in (truth.members | truth.half_gone).items():
            m = self.model.members[trajectory_id]
            assert (record.state, record.tokens) == (m.state, m.tokens)
            if trajectory_id in in_groups:
                assert record.step == m.step
            if m.state in ("leased", "finished"):
                assert record.session == m.session
            if m.state not in ("dead", "surplus") and trajectory_id in in_groups:
                assert record.digest == TokenDigest().extended(segments(m.saves))

    def the_view_agrees_with_the_model(self) -> None:
        for groups, shortest in ((True, False), (True, True), (False, False)):
            view = self.do(self.store.mesh.view(groups=groups, shortest=shortest))
            self.model.now = view.now + self.passed_seconds
            self.model.used_memory_bytes, self.model.max_memory_bytes = view.used_memory_bytes, view.max_memory_bytes
            expected = self.model.view(groups=groups, shortest=shortest)
            assert view.memory_ratio == pytest.approx(expected.memory_ratio)
            assert (view.blocked_since is None) == (expected.blocked_since is None)
            # The model's clock moves only here and by hours, so it agrees but for the real time of the steps.
            for name, error in MEASURED.items():
                assert getattr(view, name) == pytest.approx(getattr(expected, name), abs=error), name
            server = {name: getattr(view, name) for name in ("now", "memory_ratio", "blocked_since", *MEASURED)}
            assert view == replace(expected, **server)
        assert self.do(self.store.leadership.desired()).start_at_version == self.model.start_at_version

    def the_history_agrees_with_the_model(self) -> None:
        history, records = self.model.history, self.store.prompt_records
        assert self.do(records.read([str(i) for i in range(self.cursor)])) == history.records
        assert self.do(records.predictions()) == list(history.predictions)

    def the_counters_agree_with_the_model(self) -> None:
        model, counts = self.model, self.do(self.store.mesh.counts())
        waiting = {"pending": len(model.pending), "partial": len(model.partial), "resting": len(model.resting)}
        assert counts.trajectories == waiting | {s: model.counts[s] for s in counts.trajectories if s not in waiting}
        assert counts.groups == {state: len(groups) for state, groups in model.groups.items()}
        assert {**counts.totals} == {**counts.totals, **{k: n for k, n in model.totals.items() if n}}
        assert {k for k, n in counts.totals.items() if n} - model.totals.keys() <= SERVER_TOTALS
        assert counts.drops == model.drops
        assert +Counter(counts.dropped_tokens) == +model.dropped_tokens
        assert counts.drop_deciles == model.drop_deciles
        assert counts.begun_again_deciles == model.begun_again_deciles
        assert counts.surplus_deciles == model.surplus_deciles
        assert counts.finished_lengths == model.finished_lengths
        assert (counts.scoring_queue, counts.sessions) == (len(model.scoring), len(self.sessions))
        first = model.resting.first()
        assert counts.oldest_rest_step == (None if first is None else model.resting.score(first))
        noted = {gid: why for gid, why in model.ended.items() if gid not in model.half_gone}
        dropped = self.do(self.store.ledger.dropped_groups())
        assert dropped == {gid: why for gid, why in noted.items() if why != "consumed"}
