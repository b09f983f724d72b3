"""The queue bench runs and compares; its bars are for an idle machine, so they are not checked here."""

from benchmarks.queue import run


def test_the_bench_measures_lives_beside_a_bare_stream_and_the_cost_of_what_is_resident() -> None:
    measures = {m.name: m for m in run(quick=True)}
    for size in (8, 16):
        lives = measures[f"lives of 2048-token trajectories, group size {size}"]
        assert lives.baseline == "bare XADD/XREADGROUP/XACK"
        assert lives.baseline_value is not None
        assert lives.ratio == lives.value / lives.baseline_value
    assert [str(bar) for bar in measures["largest over smallest of these"].bars] == ["value <= 1.2"]
    assert len(measures) == 2 + 4 and all(m.value > 0 for m in measures.values())
