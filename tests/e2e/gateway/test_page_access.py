"""The live page without a mouse and without eyes: keyboard, landmarks, names, contrasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from .conftest import NARROW, TOKEN, WIDE, Scene, Window

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., Window]

FOCUSED = """() => {
  const node = document.activeElement;
  const style = getComputedStyle(node);
  const all = [...document.querySelectorAll("*")];
  return {
    at: all.indexOf(node), tag: node.tagName, id: node.id, text: node.textContent.slice(0, 40),
    outlined: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1,
    visible: node.getClientRects().length > 0 && node.getBoundingClientRect().bottom > 0,
  };
}"""
MOST_TABS = 260


def test_every_control_is_reached_by_tab_in_reading_order_with_a_visible_focus(window: Open, at_rest: Scene) -> None:
    page = window().open()
    page.locator("#letter-table tbody tr").first.wait_for()
    page.wait_for_function("() => document.querySelectorAll('figure.chart svg[aria-label]').length >= 5")
    seen = _walk(page)
    assert seen[0]["text"] == "Skip to the run"
    assert [s for s in seen if not s["visible"]] == []
    assert [s for s in seen if not s["outlined"]] == []
    places = [s["at"] for s in seen]
    assert places == sorted(places), "focus jumps back"
    ids = {s["id"] for s in seen}
    assert {"theme", "zoom-in", "rollouts-as-table", "trajectory-state", "trajectory-id", "token"} <= ids
    assert "CANVAS" in {s["tag"] for s in seen}


def _walk(page: Page) -> list[dict[str, Any]]:
    """What has the focus after each press of Tab, once through the page."""
    seen: list[dict[str, Any]] = []
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        found = page.evaluate(FOCUSED)
        if found["tag"] == "BODY" or (seen and found["at"] == seen[0]["at"]):
            return seen
        seen.append(found)
    raise AssertionError(f"more than {MOST_TABS} stops")


def test_the_skip_link_leads_past_the_navigation(window: Open) -> None:
    page = window().open()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('main').contains(document.activeElement)")


def test_rollouts_and_curves_are_read_with_the_arrow_keys(window: Open, at_rest: Scene) -> None:
    page = window().open()
    canvas = page.locator("#timeline canvas")
    canvas.focus()
    page.keyboard.press("ArrowDown")
    words = page.locator("#timeline-readout").text_content() or ""
    assert words.startswith("e0-") and "tokens" in words and "rollout-" in words
    page.keyboard.press("ArrowDown")
    assert page.locator("#timeline-readout").text_content() != words
    _select_one_in_flight(page)
    page.keyboard.press("Enter")
    page.locator("#viewer .tokens .t").first.wait_for()
    page.keyboard.press("Escape")
    chart = page.locator("figure.chart", has_text="Saved tokens per second").first
    chart.locator("svg[aria-label]").focus()
    page.keyboard.press("End")
    assert "tokens/s" in (chart.locator(".readout").text_content() or "")
    chart.locator("summary").click()
    chart.locator("tbody tr").nth(1).wait_for()


def _select_one_in_flight(page: Page) -> None:
    """Go down the lanes to a rollout that is under way: one that has ended may have been trained, and be gone."""
    for _ in range(MOST_TABS):
        if ", leased, " in (page.locator("#timeline-readout").text_content() or ""):
            return
        page.keyboard.press("ArrowDown")
    raise AssertionError(f"no rollout in flight in {MOST_TABS} lanes")


def test_changes_of_state_are_announced_and_numbers_are_not(window: Open) -> None:
    shown = window()
    page = shown.open()
    page.evaluate(
        """() => {
          window.heard = [];
          new MutationObserver(() => window.heard.push(document.getElementById("announce").textContent))
            .observe(document.getElementById("announce"), { childList: true, characterData: true, subtree: true });
        }"""
    )
    shown.wait_for_looks(8)
    assert page.evaluate("window.heard") == []
    page.fill("#token", TOKEN)
    page.press("#token", "Enter")
    page.locator("#pause:not([disabled])").click()
    page.wait_for_function("() => window.heard.some((text) => text.includes('paused'))")
    page.locator("#resume:not([disabled])").click()
    page.wait_for_function("() => window.heard.at(-1).includes('running')")
    assert page.locator("#announce").get_attribute("role") == "status"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1440", "390"])
def test_axe_finds_nothing(window: Open, at_rest: Scene, size: dict[str, int], scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed: make setup").Axe()
    page = window(viewport=size, color_scheme=scheme, reduced_motion="reduce").open()
    page.locator("#letter-table tbody tr").first.wait_for(state="attached")
    page.click("#rollouts-as-table")
    # A phone shows one section at a time: the navigation leads to each.
    _tab(page, "Control")
    page.fill("#token", TOKEN)
    page.press("#token", "Enter")
    _tab(page, "Versions")
    page.locator("#version-table button.danger:not([disabled])").first.wait_for()
    for link in page.locator("nav a:visible").all() if size is NARROW else []:
        link.click()
        _check(axe, page)
    _check(axe, page)
    _tab(page, "Trajectories")
    page.locator("#trajectory-table tbody button").first.click()
    page.locator("#viewer .tokens .t").first.wait_for()
    _check(axe, page)
    page.keyboard.press("Escape")
    _tab(page, "Versions")
    page.locator("#version-table button.danger").first.click()
    _check(axe, page)
    page.keyboard.press("Escape")


def _tab(page: Page, name: str) -> None:
    page.get_by_role("link", name=name, exact=True).click()


def _check(axe: Any, page: Page) -> None:
    found = axe.run(page)
    violations = [
        (rule["id"], rule["help"], [node["html"][:160] for node in rule["nodes"]][:4])
        for rule in found.response["violations"]
    ]
    assert violations == []
    assert len(found.response["passes"]) >= 10
