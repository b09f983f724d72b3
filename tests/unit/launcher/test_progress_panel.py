import contextlib
import io
import json
import os

import pytest
from rich.console import Console

from rollmesh.launcher.progress_panel import TRAINING, RunProgress
from rollmesh.launcher.timeline_recorder import MeshSample
from rollmesh.mesh import Desired, MeshView
from rollmesh.report.console import OutputConsole

from ...kit.records import generator_record, mesh_view


def view(**changes) -> MeshView:
    steps = dict.fromkeys(("trained_step", "cut_step", "policy_version", "policy_train_step"), 7)
    groups = {"admitted_unconsumed": 40, "open_groups": 20, "ready_groups": 20, "ready_by_step": ((7, 20),)}
    values = {"now": 0.0, **steps, **groups, "leased": 180, "desired": Desired(pool_size=192)}
    return mesh_view(**{**values, **changes})


def sample(serving=True, pinned=None, **changes) -> MeshSample:
    generator = generator_record("a", policy_version=6, running_count=1, serving=serving)
    return MeshSample(
        t=1.0,
        view=view(**changes),
        generators=(generator,),
        loads=(),
        generated_token_total=100.0,
        generated_tokens={},
        saved_token_total=0,
        dropped={"run_complete": 8, "stale": 0},
        work={},
        pinned_version=pinned,
    )


@pytest.fixture
def shown(tmp_path):
    """Show one look at the mesh; returns what was written."""
    report = {"reward_mean": 0.5, "response_length_mean": 71.2, "staleness_mean": 2.9, "off_policy_token_share": 0.4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(report) + "\n")
    text = {"prompt": "1 2 > 3 :", "completion": "[bold]" + "1 + 2 = 3 !\n" * 30, "reward": 1.0}
    (tmp_path / "samples.jsonl").write_text(json.dumps(text) + "\n")

    def show(*looks: MeshSample, terminal: bool, width: int = 80, agents: str | None = None, waits: str = "") -> str:
        out = io.StringIO()
        console = Console(file=out, width=width, height=40, force_terminal=terminal, color_system=None)
        progress = RunProgress(
            console, train_steps=40, metrics=tmp_path / "metrics.jsonl", samples=tmp_path / "samples.jsonl"
        )
        with progress:
            for look in looks:
                progress.update(look, TRAINING, agents, waits)
            if terminal:
                progress._live.refresh()
        return out.getvalue()

    return show


def test_a_pipe_gets_one_line_per_update_of_any_length(shown) -> None:
    text = shown(sample(), terminal=False)
    assert text.count("\n") == 1
    for part in (
        "step 7/40",
        "reward 0.500",
        "length 71",
        "tokens/s ",
        "version 7, served 6",
        "in flight 180 of 192",
        "staleness 2.90",
        "off-policy 40%",
        "dropped run complete 8",
    ):
        assert part in text
    assert len(text) > 80


def test_a_start_and_a_queue_that_is_held_up_say_why(shown) -> None:
    text = shown(sample(serving=False), terminal=False)
    assert text.rstrip().endswith("waiting for a generator that serves a policy") and "tokens/s" not in text
    assert "queue" not in shown(sample(), terminal=False)
    assert "queue recovering: Redis was restarted" in shown(sample(recovering=True), terminal=False)
    assert "queue paused" in shown(sample(user_paused=True), terminal=False)
    held = Desired(pool_size=192, start_at_version=5)
    pinned = shown(sample(pinned=4, desired=held), terminal=False)
    assert "queue pinned to version 4, too old for new rollouts" in pinned
    assert "pinned" not in shown(sample(pinned=5, desired=held), terminal=False)
    url = "http://127.0.0.1:8081/v1"
    text = shown(sample(leased=0), terminal=False, agents=url)
    assert f"queue waiting for agents, which open sessions at {url}/sessions" in text
    assert "agents" not in shown(sample(), terminal=False, agents=url), "sessions are open"


def test_the_panel_says_the_phase_the_time_and_the_time_left_as_the_page_does(shown, tmp_path) -> None:
    ends = {7: 70.0, 8: 80.0, 9: 90.0, 10: 700.0, 11: 710.0}
    reports = [json.dumps({"train_step": step, "time": time}) + "\n" for step, time in ends.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(reports))
    text = shown(sample(trained_step=11, now=714.0), terminal=True)
    assert "training" in text and "the last train step" not in text
    assert "about 4 min 46 s left" in text, "29 steps of 10 s, which a pause does not change, without the 4 s since"
    (tmp_path / "metrics.jsonl").write_text(reports[0])
    assert "left" not in shown(sample(trained_step=7, now=74.0), terminal=True)


@pytest.mark.parametrize("serving", [True, False])
def test_what_a_service_waits_for_takes_the_place_of_the_time_left(shown, tmp_path, serving: bool) -> None:
    reports = [json.dumps({"train_step": step, "time": 10.0 * step}) + "\n" for step in (7, 8, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(reports))
    text = shown(sample(serving, trained_step=9, now=91.0), terminal=False, waits="trainer-0: disk full: publish")
    assert "trainer-0: disk full: publish" in text and "left" not in text


def test_a_panel_keeps_the_bar_beside_its_step_and_the_sample_on_one_line(shown) -> None:
    lines = [line for line in shown(sample(), terminal=True).splitlines() if "│" in line]
    assert "step" in lines[0]
    assert "7/40" in lines[0]
    assert "\u2501" in lines[0]
    assert len({line for line in lines if "1 + 2 = 3" in line}) == 1
    assert any("[bold]1 + 2" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_pipe_without_a_reader_does_not_end_the_run(tmp_path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(BrokenPipeError), open(writer, "w", buffering=1) as out:
        console = OutputConsole(file=out)
        progress = RunProgress(console, train_steps=1, metrics=tmp_path / "m", samples=tmp_path / "s")
        progress.note("draining services")
        progress.note("stopped")
    assert console.quiet
