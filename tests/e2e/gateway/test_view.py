"""`rollmesh view`: the page of a run that has ended, from its run folder alone."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.config import load_run_config
from rollmesh.config.recipes import resolve_model
from rollmesh.mesh import Cursor
from rollmesh.report.recorded_run import REPORT_FILE
from rollmesh.report.report_file import write_report
from rollmesh.runtime.endpoints import Endpoint, published_endpoint
from rollmesh.text import Tokenizer
from rollmesh.types import Batch, FinishReason, Group, OutcomeKind, Prompt, RewardOutcome, Segment, Trajectory

from ...integration.report.made_run import make_run
from ...kit.checkpoint_samples import write_batch
from ..conftest import WAIT_SECONDS
from .conftest import NARROW, WIDE, Window, ask, expect, show_section, viewing

Open = Callable[..., Window]

STEPS, GROUPS, MEMBERS = 100, 25, 4
"""10,000 trajectories."""
WORST_STEP, WORST = 5, "e0-107.3"
"""The longest answer of the step, and the only one of its step without a entropy."""
FIRST_PAINT_MS = 1000
LOADS = 10
"""Loads of the page of which one must paint in time: these machines are at times several times slower."""
TALLEST_PHONE = 4400
TABS = {
    "Result": "result",
    "Mesh": "history",
    "Queue": "queue",
    "Curves": "curves",
    "Evaluations": "evaluations",
    "Versions": "versions",
    "Trajectories": "trajectories",
    "Completions": "samples",
    "Processes": "processes",
    "Configuration": "settings",
}
"""Links of the navigation with their sections."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a batch file of every step."""
    run = make_run(tmp_path_factory.mktemp("view") / "run", steps=STEPS)
    config = load_run_config(run / "config.yaml")
    tokenizer = Tokenizer(resolve_model("recipe:countdown"))
    checkpoints = open_checkpoints(config)
    for step in range(1, STEPS + 1):
        write_batch(checkpoints, _batch(step, tokenizer), Cursor(epoch=0, index=step * GROUPS))
    return run


def _batch(step: int, tokenizer: Tokenizer) -> Batch:
    indices = range((step - 1) * GROUPS, step * GROUPS)
    groups = (
        Group(
            group_id=f"e0-{index}",
            admission_index=index,
            trajectories=tuple(_trajectory(index, member, step, tokenizer) for member in range(MEMBERS)),
        )
        for index in indices
    )
    return Batch(train_step=step, groups=tuple(groups))


def _trajectory(index: int, member: int, step: int, tokenizer: Tokenizer) -> Trajectory:
    name = f"e0-{index}.{member}"
    is_worst = name == WORST
    versions = (max(0, step - 2), step - 1)
    ids = tokenizer.encode("1 + 2 = 3 ~ 4 = 5 , " * (9 if is_worst else 1 + member))
    segments = tuple(
        Segment(
            token_ids=part,
            behavior_logprobs=-np.ones(len(part), np.float32),
            policy_version=version,
            kv_min_version=version,
        )
        for version, part in zip(versions, np.array_split(ids, 2), strict=True)
    )
    value = 0.0 if is_worst else 1.0
    return Trajectory(
        trajectory_id=name,
        group_id=f"e0-{index}",
        member_index=member,
        prompt=Prompt(prompt_id=str(index), token_ids=tokenizer.encode("1 2 3 > 3 :"), verifier="countdown"),
        segments=segments,
        finish_reason=FinishReason.STOP,
        outcome=RewardOutcome(kind=OutcomeKind.SCORED, value=value),
        shaped_reward=value,
        birth_version=versions[0],
    )


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with viewing(folder) as found:
        yield found


@pytest.fixture
def viewed(window: Open, url: str) -> Callable[..., Window]:
    """Open windows on the viewed run."""
    return lambda **options: window(url, **options)


def test_ten_thousand_trajectories_do_not_delay_the_first_paint(viewed: Open) -> None:
    times: list[float] = []
    while len(times) < LOADS and min(times, default=FIRST_PAINT_MS) >= FIRST_PAINT_MS:
        page = viewed().open(1)
        page.locator("#batch-table tbody tr").first.wait_for()
        paints = page.evaluate("performance.getEntriesByType('paint').map((e) => [e.name, e.startTime])")
        print("paint, ms:", paints)
        times.append(dict(paints)["first-contentful-paint"])
        page.close()
    assert min(times) < FIRST_PAINT_MS, times


def test_the_page_shows_the_result_and_no_live_section(viewed: Open) -> None:
    page = viewed().open(1)
    expect(page.locator("#run-state")).to_have_text("finished")
    expect(page.locator("#connection")).to_have_text("from the run folder")
    for words in (f"finished after train step {STEPS} of {STEPS}", "audit", "accuracy after"):
        expect(page.locator("#result-lines")).to_contain_text(words)
    for gone in ("#rollouts", "#queue-states", "#generators", "#letters", "#control"):
        expect(page.locator(gone)).to_be_hidden()
    expect(page.locator("#version-table tbody tr")).to_have_count(STEPS + 1)
    expect(page.locator("#version-table button")).to_have_count(0)
    expect(page.locator("#evaluations tbody tr")).to_have_count(2)
    expect(page.locator("#history path.range[d*=L]").first).to_be_visible()
    page.wait_for_function("() => document.querySelectorAll('figure.chart path.mean[d*=L]').length >= 11")
    page.click("#settings summary")
    page.locator("#settings-text", has_text="recipe:countdown").wait_for()


def test_the_end_of_a_log_is_shown_to_the_holder_of_the_token(window: Open, folder: Path, url: str) -> None:
    (folder / "logs" / "trainer-0.log").write_text("started\n<b>stopped</b>\n")
    page = window(url).open(1)
    page.get_by_role("button", name="Show the log of trainer-0").click()
    page.locator("#log-text", has_text="started\n<b>stopped</b>").wait_for()
    page.get_by_role("button", name="Hide the log of trainer-0").click()
    page.locator("#log").wait_for(state="hidden")
    other = window(_page(url))
    other.expect("401")
    page = other.open(1)
    page.get_by_role("button", name="Show the log of trainer-0").click()
    page.locator("#log-text", has_text="needs the token").wait_for()


def test_the_worst_answer_of_a_step_is_found_by_sorting(viewed: Open) -> None:
    page = viewed().open(1)
    page.select_option("#trajectory-step", str(WORST_STEP))
    page.locator("#trajectories-note", has_text=f"step {WORST_STEP}: 1 to 50 of 100 trajectories").wait_for()
    first = page.locator("#batch-table tbody tr").first
    page.get_by_role("button", name="reward").click()
    page.locator("#batch-table tbody tr:first-child th", has_text=WORST).wait_for()
    expect(page.locator("#batch-table th[aria-sort=ascending]")).to_have_text("reward \u2191")
    expect(first.locator(".preview")).to_contain_text("1 + 2 = 3")
    page.get_by_role("button", name="tokens", exact=True).click()
    page.locator("#trajectories-next").click()
    page.locator("#trajectories-note", has_text="51 to 100 of 100").wait_for()
    expect(page.locator("#batch-table tbody tr").last).to_contain_text(WORST)  # the longest one
    page.get_by_role("button", name=WORST, exact=True).click()
    page.locator("#viewer .tokens .policy .t").first.wait_for()
    members = [re.compile(f" reward {reward}$") for reward in ("1.00", "1.00", "1.00", "0")]
    expect(page.locator("#viewer .members button")).to_have_text(members)
    page.keyboard.press("Escape")


def test_a_dragged_range_zooms_all_curves_of_its_axis(viewed: Open) -> None:
    page = viewed().open(1)
    entropy = page.locator("figure.chart", has_text="Entropy").first
    loss = page.locator("figure.chart", has_text="Loss").first
    entropy.locator("path.mean[d*=L]").wait_for()
    svg = entropy.locator("svg")
    width, height = svg.evaluate("node => [node.clientWidth, node.clientHeight]")
    # Drag by places inside of the chart: whatever loads above it moves it.
    begin, end = ({"x": width * share, "y": height / 2} for share in (0.5, 0.75))
    svg.drag_to(svg, source_position=begin, target_position=end)
    for chart in (entropy, loss):
        chart.locator("svg[aria-label*='from step 4'][aria-label*='to step 7']").wait_for()
    page.click("#curves-reset")
    entropy.locator(f"svg[aria-label*='to step {STEPS}']").wait_for()
    page.click("#curves-time")
    entropy.locator("svg[aria-label*='by time']").wait_for()
    raw = entropy.locator("path.mean").get_attribute("d")
    assert raw is not None
    page.click("#curves-smooth")
    expect(entropy.locator("path.mean")).not_to_have_attribute("d", raw)
    page.click("#curves-smooth")
    expect(entropy.locator("path.mean")).to_have_attribute("d", raw)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1440", "390"])
def test_every_tab_shows_data(viewed: Open, size: dict[str, int]) -> None:
    page = viewed(viewport=size).open(1)
    page.wait_for_function("() => document.querySelector('#curves figcaption span').textContent !== ''")
    for table in ("batch", "version", "process"):
        page.locator(f"#{table}-table tbody tr").first.wait_for(state="attached")
    expect(page.locator("nav a:visible")).to_have_text(list(TABS))
    for name in TABS:
        show_section(page, name)
        section = page.locator(f"#{TABS[name]}")
        expect(section).to_be_visible()
        expect(section).not_to_be_empty()
        expect(section.locator(".empty:visible")).to_have_count(0)
        heights = page.evaluate("[document.documentElement.scrollHeight, document.documentElement.scrollWidth]")
        assert heights[1] <= size["width"]
        if size is NARROW:
            assert heights[0] < TALLEST_PHONE, (name, heights)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1440", "390"])
def test_the_report_opens_offline_and_is_whole(
    browser: Any, folder: Path, tmp_path: Path, size: dict[str, int]
) -> None:
    shutil.copytree(folder, run := tmp_path / "run")
    report, errors = write_report(run), []
    page = browser.new_page(viewport=size)
    page.on("console", lambda message: errors.append(message.text))
    page.on("request", lambda request: errors.append(request.url) if request.url.startswith("http") else None)
    page.goto(report.as_uri())
    for name in ("result", "history", "curves", "evaluations", "versions", "trajectories", "samples", "logs"):
        page.locator(f"nav a[href='#{name}']").click()
        expect(page.locator(f"#{name}")).to_be_visible()
        if name == "curves":  # a phone draws those of the section that it shows
            page.wait_for_function("() => document.querySelectorAll('#curves path.mean[d*=L]').length >= 12")
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], name
    show_section(page, "Trajectories")
    page.locator("#batch-table tbody button").first.click()
    page.locator("#viewer .tokens .policy .t").first.wait_for()
    assert errors == []
    page.close()


def test_an_ended_run_takes_no_action_and_shows_its_configuration_to_the_holder_of_the_link(
    folder: Path, url: str
) -> None:
    page, token = url.split("?token=")
    for path in ("pause", "unpin", "scale", "policies/0/pin"):
        assert httpx.post(f"{page}api/v1/{path}", timeout=WAIT_SECONDS).status_code in (404, 405), path
    assert ask(f"{page}api/v1/about").json()["token_for_reads"] is False
    assert ask(f"{page}api/v1/config").status_code == 401
    answer = ask(f"{page}api/v1/config", headers={"Authorization": f"Bearer {token}"})
    assert "recipe:countdown" in answer.json()["yaml"]
    assert not (folder / REPORT_FILE).exists()
    assert ask(f"{page}{REPORT_FILE}").status_code == 404


def test_an_ended_run_that_hides_itself_is_shown_to_the_holder_of_its_token(folder: Path, tmp_path: Path) -> None:
    run, token = tmp_path / "run", "a-token-of-ours"
    shutil.copytree(folder, run, ignore=shutil.ignore_patterns("checkpoints"))
    (run / REPORT_FILE).write_text("<h1>report</h1>")
    with viewing(run, ROLLMESH_GATEWAY__TOKEN=token, ROLLMESH_GATEWAY__TOKEN_FOR_READS="true") as link:
        page = _page(link)
        assert link == f"{page}?token={token}"
        for path in ("about", "overview", "series", "batches", "config"):
            assert ask(f"{page}api/v1/{path}").status_code == 401, path
        assert ask(f"{page}{REPORT_FILE}").status_code == 404
        headers = {"Authorization": f"Bearer {token}"}
        assert ask(f"{page}api/v1/about", headers=headers).json()["token_for_reads"] is True
        assert ask(f"{page}api/v1/overview", headers=headers).json()["result"]["report"] is False


def _page(link: str) -> str:
    """Return the address of the page without the token."""
    return link.partition("?")[0]


def test_what_is_no_ended_run_and_a_port_that_does_not_exist_are_refused(folder: Path, tmp_path: Path) -> None:
    assert "no config.yaml there; is this a run folder?" in _refused(tmp_path)
    found = _refused(folder, "--port", "70000")
    assert "65535" in found and "Traceback" not in found
    run = tmp_path / "run"
    (run / "services").mkdir(parents=True)
    (run / "config.yaml").write_text((folder / "config.yaml").read_text())
    (run / "lock").write_text(str(os.getpid()))
    with published_endpoint(run, Endpoint(service="gateway", index=0, grpc="", admin="", url="http://127.0.0.1:1/")):
        found = _refused(run)
    assert "the run is in progress; its page: http://127.0.0.1:1/" in found
    assert "rollmesh status" in found


def _refused(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "rollmesh.cli.main", "view", str(folder), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 2, ended
    return ended.stderr
