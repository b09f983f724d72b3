"""The live page in a real browser, in front of a queue that moves."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from .conftest import NARROW, WIDE, Scene, Window, until

Open = Callable[..., Window]

FIRST_PAINT_MS = 1000
LAYOUT = """() => {
  const shown = (node) => node.getClientRects().length > 0;
  const boxes = [...document.querySelectorAll("header, main section, footer")].filter(shown);
  const found = boxes.map((node) => ({ name: node.id || node.tagName, box: node.getBoundingClientRect().toJSON() }));
  const small = [...document.querySelectorAll("button, select, input, nav a, summary")].filter(shown)
    .filter((node) => { const b = node.getBoundingClientRect(); return b.height < 24 || b.width < 16; })
    .map((node) => node.outerHTML.slice(0, 120));
  const root = document.documentElement;
  return { found, small, width: root.scrollWidth, room: root.clientWidth };
}"""


def test_the_first_paint_comes_within_a_second(window: Open) -> None:
    page = window().open()
    paints = page.evaluate("performance.getEntriesByType('paint').map((e) => [e.name, e.startTime])")
    print("paint, ms:", paints)
    times = dict(paints)
    assert times["first-contentful-paint"] < FIRST_PAINT_MS
    assert page.title().startswith("page: running")


def test_values_and_curves_move_with_the_run(window: Open) -> None:
    shown = window()
    page = shown.open()
    step, version = shown.step(), shown.fact("Policy version")
    page.wait_for_function(
        "step => Number(document.querySelector('#facts dd').textContent) >= step", arg=step + 2, timeout=60_000
    )
    assert shown.fact("Policy version") != version
    assert page.locator("#connection").text_content() == "live"
    assert page.locator("#queue-bars tr", has_text="scored").locator("td").last.text_content() not in ("", "0")
    reward = page.locator("figure.chart", has_text="Reward").first
    page.wait_for_function("() => document.querySelector('figure.chart path.mean')?.getAttribute('d').includes('L')")
    assert "newest" in (reward.locator("svg").get_attribute("aria-label") or "")


def test_the_timeline_shows_every_version_in_its_colour_and_in_words(window: Open, scene: Scene) -> None:
    page = window().open()
    shades = page.evaluate(
        """() => {
          const canvas = document.querySelector("#timeline canvas");
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          const style = getComputedStyle(document.documentElement);
          const counts = {};
          for (let at = 0; at < data.length; at += 4) {
            const hex = "#" + [0, 1, 2].map((i) => data[at + i].toString(16).padStart(2, "0")).join("");
            counts[hex] = (counts[hex] ?? 0) + 1;
          }
          return [0, 1, 2, 3, 4, 5, 6, 7].map((n) => counts[style.getPropertyValue(`--v${n}`).trim()] ?? 0);
        }"""
    )
    assert sum(pixels > 200 for pixels in shades) >= 2, shades
    label = page.locator("#timeline canvas").get_attribute("aria-label") or ""
    newest = scene.get("overview")["newest_version"]
    assert "rollouts in flight" in label
    assert any(f"on v{version}" in label for version in (newest, newest - 1)), label
    page.click("#rollouts-as-table")
    rows = page.locator("#rollout-table tbody tr")
    rows.first.wait_for()
    assert rows.count() >= 20
    assert page.locator("#rollouts-as-table").get_attribute("aria-expanded") == "true"


def test_the_viewer_tells_of_every_token_who_wrote_it(window: Open, scene: Scene) -> None:
    page = window().open()
    opener = page.locator("#trajectory-table button").first
    opener.focus()
    page.keyboard.press("Enter")
    dialog = page.locator("#viewer")
    dialog.locator(".tokens .policy .t").first.wait_for()
    dialog.locator(".tokens .policy .t").first.hover()
    words = dialog.locator(".foot").text_content() or ""
    for part in ("logprob -", "policy version v", "staleness ", "train step"):
        assert part in words, words
    dialog.locator(".tokens").focus()
    page.keyboard.press("Home")
    assert "written by the prompt" in (dialog.locator(".foot").text_content() or "")
    page.keyboard.press("ArrowDown")
    assert "policy version v" in (dialog.locator(".foot").text_content() or "")
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    assert page.evaluate("document.activeElement.textContent") == opener.text_content()


def test_the_viewer_shows_versions_rewards_and_the_words_of_an_environment_apart(window: Open, scene: Scene) -> None:
    page = window().open()
    wanted = _mixed_trajectory(scene)
    page.fill("#trajectory-id", wanted)
    page.press("#trajectory-id", "Enter")
    dialog = page.locator("#viewer")
    dialog.locator(".tokens .environment").first.wait_for()
    versions = dialog.locator(".legend .version")
    assert versions.count() >= 2
    shades = {versions.nth(n).evaluate("node => getComputedStyle(node, '::before').backgroundColor") for n in (0, 1)}
    assert len(shades) == 2
    environment = dialog.locator(".tokens .environment .t").first
    environment.scroll_into_view_if_needed()
    environment.hover()
    assert "written by the environment, not trained on" in (dialog.locator(".foot").text_content() or "")
    facts = dialog.locator("dl").last.text_content() or ""
    assert "part: exact" in facts and "part: format" in facts
    dialog.get_by_role("button", name="Token ids").click()
    assert (dialog.locator(".tokens .policy .t").first.text_content() or "").isdecimal()


def _mixed_trajectory(scene: Scene) -> str:
    """A scored trajectory with tokens of two versions and of the environment."""
    found: list[str] = []

    def look() -> bool:
        for item in scene.get("trajectories?state=scored&limit=100")["items"]:
            if item["newest_version"] == item["birth_version"]:
                continue
            runs = scene.get(f"trajectories/{item['id']}")["runs"]
            if any(run["source"] == "environment" for run in runs):
                found.append(item["id"])
                return True
        return False

    until(look, "a scored trajectory with two versions and an environment")
    return found[0]


def test_text_from_outside_stays_text(window: Open) -> None:
    shown = window()
    page = shown.open()
    letter = page.locator("#letter-table tbody tr", has_text="<script>")
    letter.wait_for()
    letter.locator("button").first.click()
    page.locator("#viewer .tokens .t").first.wait_for()
    page.locator("#viewer summary").click()
    assert "<script>" in (page.locator("#viewer pre").text_content() or "")
    shown.wait_for_looks(4)
    assert page.locator("img, main script, dialog script").count() == 0
    assert "broken" not in page.title()
    assert page.evaluate("document.scripts.length") == 2


def test_the_page_asks_nobody_but_its_gateway(window: Open, scene: Scene) -> None:
    shown = window()
    shown.open()
    shown.wait_for_looks(6)
    assert len(shown.requests) > 20
    assert [url for url in shown.requests if not url.startswith(scene.url)] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1440", "390"])
def test_nothing_overflows_or_overlaps(window: Open, size: dict[str, int], scheme: str) -> None:
    shown = window(viewport=size, color_scheme=scheme)
    page = shown.open()
    page.locator("#letter-table tbody tr").first.wait_for()
    _check_layout(page.evaluate(LAYOUT))
    page.locator("#trajectory-table button").first.click()
    page.locator("#viewer .tokens .t").first.wait_for()
    inside = page.evaluate(
        """() => {
          const viewer = document.getElementById("viewer");
          const box = viewer.getBoundingClientRect();
          return box.left >= 0 && box.top >= 0 && box.right <= innerWidth && box.bottom <= innerHeight
            && viewer.querySelector(".body").scrollWidth <= viewer.querySelector(".body").clientWidth;
        }"""
    )
    assert inside


def _check_layout(layout: dict[str, object]) -> None:
    assert layout["width"] <= layout["room"], layout  # type: ignore[operator]
    assert layout["small"] == []
    found = layout["found"]
    assert isinstance(found, list) and len(found) >= 10
    for at, one in enumerate(found):
        for other in found[at + 1 :]:
            a, b = one["box"], other["box"]
            apart = (
                a["right"] <= b["left"] + 0.5
                or b["right"] <= a["left"] + 0.5
                or a["bottom"] <= b["top"] + 0.5
                or b["bottom"] <= a["top"] + 0.5
            )
            assert apart, f"{one['name']} and {other['name']} overlap: {json.dumps([a, b])}"


def test_the_theme_follows_the_system_and_can_be_chosen(window: Open) -> None:
    shown = window(color_scheme="dark")
    page = shown.open()
    surface = "getComputedStyle(document.querySelector('.panel')).backgroundColor"
    dark = page.evaluate(surface)
    page.click("#theme")
    page.click("#theme")
    assert page.locator("#theme").text_content() == "Theme: light"
    light = page.evaluate(surface)
    assert light != dark
    page.reload()
    shown.wait_for_looks(1)
    assert page.evaluate(surface) == light
    page.click("#theme")
    assert page.evaluate(surface) == dark


def test_motion_is_left_out_for_those_who_ask(window: Open) -> None:
    page = window(reduced_motion="reduce").open()
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    moving = page.evaluate(
        """[...document.querySelectorAll("*")].map((node) => getComputedStyle(node))
           .filter((s) => parseFloat(s.transitionDuration) > 0 || s.animationName !== "none").length"""
    )
    assert moving == 0
