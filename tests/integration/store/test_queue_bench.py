"""The queue bench runs and compares; its bars are for an idle machine, so they are not checked here."""

from __future__ import annotations

from benchmarks.queue import run


def test_the_bench_measures_lives_beside_a_bare_stream_and_every_operation() -> None:
    measures = {m.name: m for m in run(quick=True)}
    for size in (8, 16):
        lives = measures[f"lives of 2048-token trajectories, group size {size}"]
        assert lives.baseline == "bare XADD/XREADGROUP/XACK"
        assert lives.baseline_value is not None
        assert lives.ratio == lives.value / lives.baseline_value
    operations = {name.partition(" of ")[0] for name in measures if name.endswith("p99")}
    assert {"lease", "partial save", "finish", "score", "cut", "claim", "confirm", "report trained"} <= operations
    assert all(m.value > 0 for m in measures.values())
