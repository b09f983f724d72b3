"""The page of simulated arms: which arm is the best, what it has of each, and samples that change no result."""

import json
import re
from types import SimpleNamespace

import numpy as np
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.sim.run_timeline import RunTimeline
from rollmesh.sim.simulated_mesh import SimulatedMesh
from rollmesh.sim.simulation_page import best_arm

from .meshes import mesh_settings


def test_the_best_arm_has_the_least_staleness_among_those_with_nearly_the_largest_throughput():
    def arm(tokens, staleness):
        return SimpleNamespace(figures=SimpleNamespace(trained_tokens_per_second=tokens, mean_staleness=staleness))

    slow, thrifty, greedy = arm(97.9, 0.1), arm(98.0, 1.0), arm(100.0, 3.0)
    assert best_arm([slow, thrifty, greedy]) is thrifty
    assert best_arm([greedy]) is greedy


def test_samples_change_no_result_and_their_number_is_bounded():
    settings, timeline = mesh_settings("copris"), RunTimeline()
    assert SimulatedMesh(settings, timeline=timeline).run() == SimulatedMesh(settings).run()
    time, versions, running = timeline.arrays()
    assert versions.shape == running.shape == (4, len(time)) and len(time) > 20
    assert set(versions.ravel().tolist()) == {-1, 0, 1, 2, 3, 4, 5} and running.max() <= 8
    for moment in range(100_000):
        timeline.observe(1e6 + moment, {})
    assert len(timeline.times) < 1024 and timeline.times[0] == time[0]


def test_the_command_writes_a_page_with_the_figures_and_the_calls_of_every_arm(tmp_path):
    sets = ["schedule.groups_per_batch=2", "schedule.group_size=2", "generator.replicas=2", "trainer.train_steps=3"]
    options = [argument for item in sets for argument in ("--set", item)]
    page = tmp_path / "sim.html"
    result = CliRunner().invoke(app, ["sim", *options, "--sweep", "schedule.max_staleness=1,2", "--page", str(page)])
    assert result.exit_code == 0, result.output
    arms = json.loads(re.findall(r'id="recorded">(.*?)</script>', page.read_text())[0])["arms"]
    assert [arm["name"] for arm in arms] == ["schedule.max_staleness=1", "schedule.max_staleness=2"]
    assert sum(arm["best"] for arm in arms) == 1
    for arm in arms:
        calls = np.zeros(len(arm["time"]))
        for part in arm["running"]:
            calls[part["first"] : part["first"] + len(part["calls"])] += part["calls"]
        assert 0 < calls.max() <= max(arm["slots"]) and len(arm["update_seconds"]) >= 1
        versions = [part["policy_version"] for part in arm["generators"]]
        assert versions == sorted(versions) and len(versions) > 1
