"""The live page of a mesh that trains, as ``rollmesh up`` starts both, until an operator stops the run."""

import signal
from collections.abc import Callable
from typing import Any

from rollmesh.runtime.endpoints import read_endpoints

from ..conftest import ENDLESS, WAIT_SECONDS, end
from .conftest import Window, expect

Open = Callable[..., Window]


def test_a_training_mesh_is_watched_looked_into_scaled_paused_and_stopped(
    window: Open, started: Callable[..., Any], wait_until: Callable[..., None]
) -> None:
    line, process = started(
        trainer={"train_steps": ENDLESS}, generator={"replicas": 1, "slots": 32}, gateway={"enabled": True}
    )
    wait_until(lambda: bool(read_endpoints(line.folder, "gateway")), "the gateway", process)
    wait_until(lambda: len(line.json_lines("metrics.jsonl")) >= 2, "two train steps", process)
    shown = window(read_endpoints(line.folder, "gateway")[0].url)
    page = shown.open()
    page.wait_for_function("() => Number(document.querySelector('#facts dd')?.textContent) >= 2")
    page.wait_for_function("() => document.querySelectorAll('#generator-table tbody tr').length === 1")
    page.locator("#version-table tbody tr", has_text="\N{PLUS-MINUS SIGN}").first.wait_for()

    # A trained trajectory, read back from its batch file: text, versions, reward.
    sample = line.json_lines("samples.jsonl")[0]
    page.fill("#trajectory-id", sample["trajectory_id"])
    page.press("#trajectory-id", "Enter")
    tokens = page.locator("#viewer .tokens .policy .t")
    tokens.first.wait_for()
    expect(page.locator("#viewer dl").first).to_contain_text("read from its batch file")
    expect(tokens).to_have_count(sample["token_count"])
    tokens.first.hover()
    page.locator("#viewer .foot", has_text="staleness").wait_for()
    page.keyboard.press("Escape")

    page.fill("#token", (line.folder / "gateway-token").read_text())
    page.press("#token", "Enter")
    page.locator("#scale-generator:not([disabled])").fill("2")
    page.get_by_role("button", name="Scale generator").click()
    page.locator("#action-result", has_text="Done").wait_for()
    page.wait_for_function(
        "() => document.querySelectorAll('#generator-table tbody tr .good').length === 2", timeout=1000 * WAIT_SECONDS
    )

    for name in ("launcher-0", "trainer-0", "generator-1", "redis"):
        row = page.locator("#process-table tbody tr", has_text=name)
        row.locator("td", has_text="MiB").first.wait_for()
        row.locator("td", has_text="%").wait_for()
    page.get_by_role("button", name="Show the log of trainer-0").click()
    page.locator("#log-text", has_text="step").wait_for()

    page.click("#pause")
    page.locator("#run-state", has_text="paused").wait_for()
    page.wait_for_function("() => document.querySelector('#queue-bars').textContent.includes('leased0')")
    page.locator("#resume:not([disabled])").click()
    page.locator("#run-state", has_text="running").wait_for()
    step = shown.step()
    page.wait_for_function("step => Number(document.querySelector('#facts dd').textContent) > step", arg=step)
    page.close()  # before the run ends and leaves its requests unanswered

    left_open = window(shown.url)
    left_open.expect("net::ERR_")
    page = left_open.open()
    process.send_signal(signal.SIGINT)
    page.locator("#connection[data-state=ended]", has_text="stopped").wait_for()
    end(process)
    expect(page.locator("#result-lines")).to_contain_text("The command that started the run continues it.")
    page.get_by_role("button", name="Connect again").click()
    page.locator("#banner", has_text=f"rollmesh view {line.folder}").wait_for()
