"""Plots of simulated arms: which arm is the best, what the pictures name, and samples that change no result."""

from dataclasses import replace

import numpy as np
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.report.plots import simulation_plots as plots
from rollmesh.report.plots import style
from rollmesh.sim.run_timeline import RunTimeline
from rollmesh.sim.simulated_mesh import SimulatedMesh

from .meshes import mesh_settings

ARM = plots.PlottedArm(
    name="copris",
    update_seconds=(10.0, 30.0, 20.0),
    staleness={0: 1, 2: 3},
    mean_staleness=1.5,
    tokens_per_second=100.0,
    time=np.array([0.0, 10.0, 20.0, 30.0]),
    versions=np.array([[-1.0, 0, 0, 1], [0, 0, 1, 1]]),
    running=np.array([[0.0, 2, 0, 1], [1, 1, 1, 1]]),
    slots=4,
)


def drawn(draw, *arguments, **options):
    with style.style():
        figure = draw(*arguments, **options)
        figure.draw_without_rendering()
    axes = figure.axes[0]
    return [text.get_text() for text in (*axes.texts, *axes.get_yticklabels(), *axes.get_xticklabels())], axes


def test_the_best_arm_has_the_least_staleness_among_those_with_nearly_the_largest_throughput():
    def arm(name, tokens, staleness):
        return replace(ARM, name=name, tokens_per_second=tokens, mean_staleness=staleness)

    slow, thrifty, greedy = arm("a.b=1", 97.9, 0.1), arm("a.b=2", 98.0, 1.0), arm("a.b=3", 100.0, 3.0)
    assert plots.best_arm([slow, thrifty, greedy]) is thrifty
    assert plots.best_arm([greedy]) is greedy
    texts, axes = drawn(plots.throughput_plot, [slow, thrifty, greedy], is_sweep=True)
    assert {"1", "2 (best)", "3"} <= set(texts) and "by a.b;" in axes.get_title("left")
    assert "a.b=2 (best)" in drawn(plots.throughput_plot, [thrifty, greedy], is_sweep=False)[0]


def test_only_the_values_of_a_sweep_are_joined():
    lines = [drawn(plots.throughput_plot, [ARM, ARM], is_sweep=each)[1].lines[0].get_linestyle() for each in (1, 0)]
    assert lines == ["-", "None"]


def test_a_row_per_arm_has_its_shares_of_staleness_and_its_median():
    texts, _ = drawn(plots.staleness_plot, [ARM])
    assert {"25%", "75%", "copris"} <= set(texts)
    _, axes = drawn(plots.update_seconds_plot, [ARM, ARM])
    assert [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 1] == [20, 20]


def test_generators_are_drawn_from_their_policy_to_the_end_pale_while_idle():
    _, axes = drawn(plots.generators_plot, ARM)
    spans = [tuple(bar.get_paths()[0].get_extents().intervalx) for bar in axes.collections]
    assert spans == [(10, 20), (20, 30), (0, 20), (20, 30)]  # What begins with the last sample has no width.
    colours = [tuple(bar.get_facecolor()[0]) for bar in axes.collections]
    assert colours[0] == colours[2] != colours[3] and colours[1] not in (colours[0], colours[3])


def test_running_calls_are_stacked_by_version_below_the_slots():
    _, axes = drawn(plots.running_calls_plot, ARM)
    assert axes.lines[0].get_ydata().tolist() == [4, 8, 8, 8]
    points = [collection.get_paths()[0].vertices for collection in axes.collections]
    tops = [[each[each[:, 0] == time, 1].max() for time in (10, 30)] for each in points]
    assert tops == [[3, 0], [3, 2]]  # All three calls run under version 0 at 10 s, and both under version 1 at 30 s.


def test_samples_change_no_result_and_their_number_is_bounded():
    settings, timeline = mesh_settings("copris"), RunTimeline()
    assert SimulatedMesh(settings, timeline=timeline).run() == SimulatedMesh(settings).run()
    time, versions, running = timeline.arrays()
    assert versions.shape == running.shape == (4, len(time)) and len(time) > 20
    assert set(versions.ravel().tolist()) == {-1, 0, 1, 2, 3, 4, 5} and running.max() <= 8
    for moment in range(100_000):
        timeline.observe(1e6 + moment, {})
    assert len(timeline.times) < 1024 and timeline.times[0] == time[0]


def test_the_command_draws_its_plots_into_a_folder(tmp_path):
    sets = ["schedule.groups_per_batch=2", "schedule.group_size=2", "generator.replicas=2", "trainer.train_steps=3"]
    options = [argument for item in sets for argument in ("--set", item)]
    sweep = ["--sweep", "schedule.max_staleness=1,2", "--plots", str(tmp_path / "plots")]
    result = CliRunner().invoke(app, ["sim", *options, *sweep])
    assert result.exit_code == 0, result.output
    arms = ("schedule.max_staleness=1", "schedule.max_staleness=2")
    expected = {"update_seconds", "staleness", "throughput"} | {
        f"{kind}-{arm}" for kind in ("running_calls", "generators") for arm in arms
    }
    written = {file.name for file in (tmp_path / "plots").iterdir()}
    assert written == {f"{name}.{kind}" for name in expected for kind in ("svg", "png")}
    assert "schedule.max_staleness=2" in (tmp_path / "plots" / "update_seconds.svg").read_text()
