from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rollmesh.report.html import MAX_SAMPLES, REPORT_FILE, write_report

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Checks nesting and collects what a browser would fetch, ids and anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.anchors: set[str] = set()
        self.fetched: list[str] = []
        self.scripts = 0
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.scripts += tag == "script"
        if tag not in VOID:
            self.stack.append(tag)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        href = values.get("href") or ""
        if tag == "a" and href.startswith("#"):
            self.anchors.add(href[1:])
        if tag in ("img", "script", "iframe", "link", "image") and (values.get("src") or href):
            self.fetched.append(str(values.get("src") or href))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack[-1] == tag, f"</{tag}> closes {self.stack[-3:]}"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(folder: Path) -> tuple[str, Page]:
    """Write the page of a folder, read it, check its nesting."""
    assert write_report(folder) == folder / REPORT_FILE
    return read_page(folder)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Path]) -> Path:
    """A complete run whose page is written; only to be read."""
    folder = make_run(tmp_path_factory.mktemp("complete") / "run", steps=12)
    write_report(folder)
    return folder


def read_page(folder: Path) -> tuple[str, Page]:
    text = (folder / REPORT_FILE).read_text(encoding="utf-8")
    page = Page(text)
    assert page.stack == []
    return text, page


def test_the_page_is_well_formed_and_fetches_nothing(complete: Path) -> None:
    text, page = read_page(complete)
    assert len(page.ids) == len(set(page.ids))
    assert page.anchors <= set(page.ids)
    assert all(source.startswith("data:") for source in page.fetched)
    assert page.scripts == 0
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", text))
    assert all("w3.org" in a or "purl.org" in a or "creativecommons" in a or "matplotlib" in a for a in addresses)
    assert "@import" not in text and "url(http" not in text


def test_the_page_follows_the_colour_scheme_of_the_reader(complete: Path) -> None:
    text, _ = read_page(complete)
    assert "prefers-color-scheme: dark" in text
    assert "var(--plot-ink)" in text


def test_every_section_of_a_complete_run_is_filled(complete: Path) -> None:
    text, page = read_page(complete)
    assert text.count("<svg ") == 8
    for word in ("0.7900", "straggler_timeout", "trainer-0.log", "groups_per_batch"):
        assert word in text, word
    assert {"summary", "plots", "evaluations", "audit", "versions", "samples", "config", "logs"} <= set(page.ids)
    assert (complete / "plots" / "reward.png").exists()


def test_text_from_the_run_cannot_inject_markup(complete: Path) -> None:
    text, page = read_page(complete)
    assert "<script>alert" not in text
    assert "<script>alert(1)</script>" in "".join(page.words)


def test_an_empty_folder_still_gets_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    text, _ = page_of(tmp_path)
    for name in ("metrics.jsonl", "timeline.jsonl", "evaluations.jsonl", "samples.jsonl", "config.yaml", "audit.json"):
        assert name in text
    assert "No train step has been recorded" in text
    assert "<svg" not in text


def test_a_run_without_metrics_keeps_its_timeline(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()
    text, _ = page_of(run_folder)
    assert "Rollouts in flight by policy version" in text
    assert "metrics.jsonl: not written" in text


def test_many_and_long_completions_are_thinned_out_and_shortened(run_folder: Path) -> None:
    for drawn in ("metrics.jsonl", "timeline.jsonl"):  # plots take seconds, and say nothing of completions
        (run_folder / drawn).unlink()
    line = '{"train_step": %d, "prompt": "p", "completion": "' + "x" * 10_000 + '", "reward": 1}\n'
    (run_folder / "samples.jsonl").write_text("".join(line % i for i in range(200)), encoding="utf-8")
    text, _ = page_of(run_folder)
    assert text.count('class="sample"') <= MAX_SAMPLES
    assert "more characters" in text
    assert "step <b>199</b>" in text


def test_writing_again_replaces_the_page_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"train_step": 1}\n', encoding="utf-8")
    first = write_report(tmp_path).read_text(encoding="utf-8")
    before = {p.name for p in tmp_path.iterdir()}
    (tmp_path / "metrics.jsonl").write_text('{"train_step": 1}\n{"train_step": 2}\n', encoding="utf-8")
    assert write_report(tmp_path).read_text(encoding="utf-8") != first
    assert {p.name for p in tmp_path.iterdir()} == before
