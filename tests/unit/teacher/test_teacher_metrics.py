"""The share of a teacher's time with work, by which it is scaled."""

from __future__ import annotations

import pytest

from rollmesh.runtime.metrics import Metrics
from rollmesh.teacher.teacher_metrics import TeacherMetrics


def test_time_with_several_sequences_counts_once_and_while_they_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    exported = Metrics("teacher")
    metrics = TeacherMetrics(exported, "large")

    def busy() -> float | None:
        return exported.registry.get_sample_value("rollmesh_teacher_busy_seconds_total", {"teacher": "large"})

    assert busy() == 0
    now = 103.0
    with metrics.sequence():
        now = 105.0
        with metrics.sequence():
            now = 109.0
        assert busy() == 6  # from 103 to 109, though the first one has not ended
        now = 110.0
        metrics.note_busy()
        assert busy() == 7  # of a sequence that is still there
    now = 150.0
    with metrics.sequence():
        assert busy() == 7
