from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from rollmesh.report.plots import plot_specs, style, write_plots
from rollmesh.report.recorded_run import RecordedRun

ALL = {"in_flight", "reward", "length", "staleness", "correction", "drift", "throughput", "queue"}


def drawn(run_folder: Path) -> set[str]:
    """Draw every plot; returns their names."""
    return {spec.name for spec, _ in write_plots(RecordedRun(run_folder))}


def test_a_complete_run_gives_every_plot_as_svg_and_png(run_folder: Path) -> None:
    assert drawn(run_folder) == ALL
    files = list((run_folder / "plots").iterdir())
    assert {f.name for f in files} == {f"{name}.{suffix}" for name in ALL for suffix in ("svg", "png")}
    for file in files:
        if file.suffix == ".png":
            assert file.read_bytes().startswith(b"\x89PNG")
        else:
            ElementTree.parse(file)


def test_a_run_without_a_timeline_keeps_the_plots_of_its_steps(run_folder: Path) -> None:
    (run_folder / "timeline.jsonl").unlink()
    assert {s.name for s in plot_specs(RecordedRun(run_folder))} == ALL - {"in_flight", "queue"}


def test_an_empty_folder_has_no_plots(tmp_path: Path) -> None:
    assert drawn(tmp_path) == set()


def test_steps_that_report_nothing_but_their_number_are_still_drawn(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"train_step": 1}\n{"train_step": 2}\n', encoding="utf-8")
    (tmp_path / "timeline.jsonl").write_text('{"t": 1}\n{"t": 2}\n', encoding="utf-8")
    assert drawn(tmp_path) == ALL


def test_a_long_timeline_without_a_running_call_is_drawn(tmp_path: Path) -> None:
    lines = "".join(f'{{"t": {second}, "generators": []}}\n' for second in range(400))
    (tmp_path / "timeline.jsonl").write_text(lines, encoding="utf-8")
    assert drawn(tmp_path) == {"in_flight", "throughput", "queue"}


def test_axes_carry_units_and_no_legend_grows_with_the_run(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    specs = plot_specs(RecordedRun(make_run(tmp_path / "long", steps=120)))
    with style.style():
        figures = {spec.name: spec.draw() for spec in specs}
    for name, figure in figures.items():
        assert figure.axes[-1].get_xlabel() or figure.axes[0].get_xlabel(), name
        assert all(axes.get_ylabel() for axes in figure.axes), name
        for axes in figure.axes:
            legend = axes.get_legend()
            assert legend is None or len(legend.get_texts()) <= 4, name
    assert [axes.get_ylabel() for axes in figures["in_flight"].axes] == ["running calls", "policy version"]


def test_titles_legends_and_panels_do_not_overlap(run_folder: Path) -> None:
    with style.style():
        for spec in plot_specs(RecordedRun(run_folder)):
            figure = spec.draw()
            figure.draw_without_rendering()
            boxes = []
            for axes in figure.axes:
                boxes.append((f"panel {axes.get_ylabel()}", axes.get_window_extent()))
                boxes.append((f"label {axes.get_ylabel()}", axes.yaxis.label.get_window_extent()))
                if axes.get_legend() is not None:
                    boxes.append((f"legend of {axes.get_ylabel()}", axes.get_legend().get_window_extent()))
                if axes.get_title(loc="left"):
                    boxes.append(("title", axes._left_title.get_window_extent()))
            for i, (one, a) in enumerate(boxes):
                for other, b in boxes[i + 1 :]:
                    apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
                    assert apart, f"{spec.name}: {one} overlaps {other}"


def test_a_plot_for_the_page_follows_its_colour_scheme_and_keeps_ids_apart(run_folder: Path) -> None:
    spec = next(s for s in plot_specs(RecordedRun(run_folder)) if s.name == "reward")
    with style.style():
        text = style.save(spec.draw(), run_folder, "plot")[0].read_text()
    one, other = style.for_page(text, "one"), style.for_page(text, "other")
    assert "var(--plot-ink)" in one
    assert style.INK not in one and style.GRID not in one
    assert ">Reward<" in one
    ids = [{e.attrib["id"] for e in ElementTree.fromstring(t).iter() if "id" in e.attrib} for t in (one, other)]
    assert ids[0] and not ids[0] & ids[1]


def test_a_long_run_stays_a_small_file(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    folder = make_run(tmp_path / "day", steps=400, seconds=20.0)
    specs = {s.name: s for s in plot_specs(RecordedRun(folder))}
    with style.style():
        assert style.save(specs["in_flight"].draw(), tmp_path, "in_flight")[0].stat().st_size < 600_000
        assert style.save(specs["queue"].draw(), tmp_path, "queue")[0].stat().st_size < 200_000


def test_the_bound_of_the_preset_is_drawn_even_if_the_run_file_leaves_it_null(run_folder: Path) -> None:
    folder = RecordedRun(run_folder)
    assert folder.config is not None and folder.config.schedule.max_staleness is None
    assert folder.max_staleness == 4
    assert json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[0])["train_step"] == 1
