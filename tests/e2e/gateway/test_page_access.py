"""The live page without a mouse and without eyes: keyboard, landmarks, names, contrasts."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from .conftest import NARROW, TOKEN, WIDE, Scene, Window, expect, show_section

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., Window]

FOCUSED = """() => {
  const node = document.activeElement;
  const style = getComputedStyle(node);
  window.walked ??= [];
  const before = window.walked.findLast((one) => one.isConnected);
  const known = window.walked.includes(node);
  window.walked.push(node);
  // By the document as it is now: between two presses a list may have become shorter.
  const follows = !before || (before.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_FOLLOWING) > 0;
  return {
    known, follows, tag: node.tagName, id: node.id, text: node.textContent.slice(0, 40),
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
    assert [s for s in seen if not s["follows"]] == [], "focus jumps back"
    ids = {s["id"] for s in seen}
    assert {"theme", "zoom-in", "rollouts-as-table", "trajectory-state", "trajectory-id", "token"} <= ids
    assert "CANVAS" in {s["tag"] for s in seen}


def _walk(page: "Page") -> list[dict[str, Any]]:
    """What has the focus after each press of Tab, once through the page."""
    seen: list[dict[str, Any]] = []
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        found = page.evaluate(FOCUSED)
        if found["tag"] == "BODY" or found["known"]:
            return seen
        seen.append(found)
    raise AssertionError(f"more than {MOST_TABS} stops")


def test_rollouts_and_curves_are_read_with_the_arrow_keys(window: Open, at_rest: Scene) -> None:
    page = window().open()
    readout = page.locator("#timeline-readout")
    page.locator("#timeline canvas").focus()
    _select_one_in_flight(page)
    expect(readout).to_have_text(re.compile("^e0-.* tokens?.*, rollout-"))
    words = readout.text_content() or ""
    page.keyboard.press("ArrowDown")
    expect(readout).not_to_have_text(words)
    _select_one_in_flight(page)
    page.keyboard.press("Enter")
    page.locator("#viewer .tokens .t").first.wait_for()
    page.keyboard.press("Escape")
    page.locator("#viewer").wait_for(state="hidden")
    chart = page.locator("figure.chart", has_text="Saved tokens per second").first
    chart.locator("svg[aria-label]").focus()
    page.keyboard.press("End")
    expect(chart.locator(".readout")).to_contain_text("tokens/s")
    chart.locator("summary").click()
    chart.locator("tbody tr").nth(1).wait_for()


def _select_one_in_flight(page: "Page") -> None:
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
    expect(page.locator("#announce")).to_have_attribute("role", "status")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1440", "390"])
def test_axe_finds_nothing(window: Open, at_rest: Scene, size: dict[str, int], scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed: make setup").Axe()
    page = window(viewport=size, color_scheme=scheme).open()
    page.locator("#letter-table tbody tr").first.wait_for(state="attached")
    page.click("#rollouts-as-table")
    # A phone shows one section at a time: the navigation leads to each.
    show_section(page, "Control")
    page.fill("#token", TOKEN)
    page.press("#token", "Enter")
    show_section(page, "Versions")
    page.locator("#version-table button.danger:not([disabled])").first.wait_for()
    for name in page.locator("nav a:visible").all_text_contents() if size is NARROW else []:
        show_section(page, name)
        _check(axe, page)
    _check(axe, page)
    show_section(page, "Trajectories")
    page.locator("#trajectory-table tbody button").first.click()
    page.locator("#viewer .tokens .t").first.wait_for()
    _check(axe, page)
    page.keyboard.press("Escape")
    show_section(page, "Versions")
    page.locator("#version-table button.danger").first.click()
    page.locator("#confirm").wait_for()
    _check(axe, page)
    page.keyboard.press("Escape")


def _check(axe: Any, page: "Page") -> None:
    found = axe.run(page)
    violations = [
        (rule["id"], rule["help"], [node["html"][:160] for node in rule["nodes"]][:4])
        for rule in found.response["violations"]
    ]
    assert violations == []
    assert len(found.response["passes"]) >= 10
