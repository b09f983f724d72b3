"""A page that stays open until its run ends, and the same run from its folder afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollmesh.runtime.endpoints import read_endpoints

from ..conftest import end
from .conftest import TOKEN, Window, expect, order, viewing

pytestmark = pytest.mark.long

Open = Callable[..., Window]


def test_a_page_left_open_says_that_the_run_finished_and_where_it_is_looked_at(
    window: Open, started: Callable[..., Any], wait_until: Callable[..., None]
) -> None:
    line, process = started(
        trainer={"train_steps": 3}, generator={"pace": [[1, 0.02]]}, gateway={"enabled": True, "token": TOKEN}
    )
    wait_until(lambda: bool(read_endpoints(line.folder, "gateway")), "the gateway", process)
    url = read_endpoints(line.folder, "gateway")[0].url
    # However long the browser takes to show it, the run is not over by then.
    order(url, "pause")
    shown = window(url)
    # The gateway ends with the run: what it was asked in that moment has no answer.
    shown.expect("net::ERR_")
    page = shown.open()
    order(url, "resume")
    page.locator("#connection[data-state=ended]", has_text="finished").wait_for()
    end(process)
    for words in ("The run finished at", "after train step 3 of 3", f"rollmesh view {line.folder}"):
        expect(page.locator("#result-lines")).to_contain_text(words)
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#run-state")).to_have_text("finished")

    with viewing(line.folder) as url:
        page = window(url).open(1)
        page.locator("#result-lines", has_text="audit green").wait_for()
        page.locator("#batch-table tbody tr").nth(15).wait_for()
        expect(page.locator("#batch-table .preview").first).not_to_be_empty()
        page.get_by_role("link", name="Report of the run").click()
        page.locator("h1", has_text="small").wait_for()
