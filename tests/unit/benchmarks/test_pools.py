"""Recommendations of docs/schedules.md: the document has a row for each arm, with its figures."""

from pathlib import Path

from benchmarks.published.pools import DOCUMENT, PLAIN_RATIO, POOL_RATIOS, SETUPS, SWITCHES, recommendation_document
from rollmesh.sim.figures import figures

from ..sim.meshes import mesh_settings, run

COMMITTED = Path(__file__).parents[3] / "docs" / DOCUMENT


def test_the_document_compares_each_row_with_the_plain_one():
    small, large = (figures(run(mesh_settings("copris", steps=4, pool_size=size))[1], 8) for size in (4, 24))
    rows = [f"{ratio:g}" for ratio in POOL_RATIOS] + list(SWITCHES)
    results = {(setup.title, row): [large if row == f"{PLAIN_RATIO:g}" else small] for setup in SETUPS for row in rows}
    gain = small.trained_tokens_per_second / large.trained_tokens_per_second - 1
    text = recommendation_document(results)
    assert text.count(f"| {gain:+.1%} |") == len(SETUPS) * len(SWITCHES)
    committed = COMMITTED.read_text()
    assert first_cells(text) == first_cells(committed), "run: make sim-recommend"
    assert text.partition("## Pools")[0] == committed.partition("## Pools")[0], "run: make sim-recommend"


def first_cells(text: str) -> list[str]:
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
