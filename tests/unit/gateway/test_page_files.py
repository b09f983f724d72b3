"""The live page as files: nothing from elsewhere, nothing that runs data as markup, colours that everybody can tell."""

import itertools
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import rollmesh.gateway
from rollmesh.config.replica_bounds import MOST_REPLICAS

PAGE = Path(rollmesh.gateway.__file__).parent / "page"
SCRIPTS = sorted(PAGE.glob("*.js"))
STYLES = sorted(PAGE.glob("*.css"))
PAGES = sorted(PAGE.glob("*.html"))
SVG_NAMESPACE = "http://www.w3.org/2000/svg"

Colour = tuple[float, float, float]

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
DEFICIENCIES = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
RAMP = 6
"""Colours between which the ramp of versions is drawn."""
LEAST_DISTANCE = 0.05
"""Between neighbours of these, in OKLab: 0.02 is just visible side by side."""


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside and data.strip():
            self.inline.append(data)


@pytest.fixture(scope="module")
def tags() -> _Tags:
    """The tags of both pages."""
    parser = _Tags()
    for file in PAGES:
        parser.feed(file.read_text())
    return parser


def test_the_page_runs_under_a_policy_that_allows_its_own_files_only(tags: _Tags) -> None:
    assert tags.inline == []
    attributes = [(tag, name) for tag, found in tags.found for name in found]
    assert [a for a in attributes if a[1] == "style" or a[1].startswith("on")] == []
    for script in SCRIPTS:
        assert not re.search(r"setAttribute\(\s*[\"']style|\beval\(|new Function|\.cssText", script.read_text()), script


def test_nothing_is_loaded_from_another_place(tags: _Tags) -> None:
    for file in (*SCRIPTS, *STYLES, *PAGES, PAGE / "icon.svg"):
        addresses = re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z0-9./-]+", file.read_text().replace(SVG_NAMESPACE, ""))
        assert addresses == [], file
    for tag, found in tags.found:
        for name in ("src", "href"):
            target = found.get(name)
            if target and tag in ("script", "link", "img"):
                assert target.startswith("page/") and (PAGE / target.removeprefix("page/")).is_file(), target


def test_every_module_and_every_element_that_a_script_names_exists(tags: _Tags) -> None:
    ids = {found["id"] for _, found in tags.found if "id" in found}
    for script in SCRIPTS:
        text = script.read_text()
        for module in re.findall(r'from "\./([^"]+)"', text):
            assert (PAGE / module).is_file(), f"{script.name} imports {module}"
        for name in re.findall(r'byId\("([^"]+)"\)', text):
            assert name in ids, f"{script.name} looks for #{name}"


def test_data_never_becomes_markup() -> None:
    for script in SCRIPTS:
        found = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser", script.read_text())
        assert found == [], script


def test_the_token_is_kept_for_the_tab_only() -> None:
    kept = [script.name for script in SCRIPTS if "localStorage" in script.read_text()]
    assert kept == ["theme.js"]
    assert "sessionStorage" in (PAGE / "api.js").read_text()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_ramp_of_versions_tells_age_by_lightness_for_every_kind_of_colour_blindness(theme: str) -> None:
    colours = _theme(theme)
    ramp = [_linear(colours[f"ramp{n}"]) for n in range(RAMP)]
    contrasts = [_contrast(colour, _linear(colours["surface"])) for colour in ramp]
    assert contrasts[0] >= 3, contrasts
    assert contrasts == sorted(contrasts), "a newer version has more contrast with the surface"
    for sight in (None, *DEFICIENCIES):
        seen = [_oklab(colour if sight is None else _as_seen(colour, sight)) for colour in ramp]
        lightness = [each[0] for each in seen]
        assert lightness in (sorted(lightness), sorted(lightness, reverse=True)), f"{theme}, {sight}"
        for n, (one, other) in enumerate(itertools.pairwise(seen)):
            assert math.dist(one, other) >= LEAST_DISTANCE, f"ramp{n} and ramp{n + 1}, {theme}, {sight}"


def test_the_theme_of_the_system_and_the_chosen_dark_theme_are_the_same() -> None:
    blocks = re.findall(r"--page: [^}]+", (PAGE / "theme.css").read_text())
    assert len(blocks) == 3
    assert _colours(blocks[1]) == _colours(blocks[2])


def _theme(name: str) -> dict[str, str]:
    blocks = re.findall(r"--page: [^}]+", (PAGE / "theme.css").read_text())
    return _colours(blocks[0 if name == "light" else 1])


def _colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", block))


def _linear(colour: str) -> Colour:
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return r, g, b


def _luminance(colour: Colour) -> float:
    return 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]


def _contrast(one: Colour, other: Colour) -> float:
    """Contrast ratio of WCAG 2."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _as_seen(colour: Colour, sight: str) -> Colour:
    r, g, b = (min(1.0, max(0.0, sum(w * c for w, c in zip(row, colour, strict=True)))) for row in DEFICIENCIES[sight])
    return r, g, b


def _oklab(colour: Colour) -> Colour:
    """OKLab (Ottosson 2020) of a linear RGB colour."""
    r, g, b = colour
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    medium = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def test_the_page_allows_as_many_replicas_as_the_command_line_and_the_api() -> None:
    script = (PAGE / "actions.js").read_text(encoding="utf-8")
    assert f"const MOST_REPLICAS = {MOST_REPLICAS};" in script
