"""Screens of ``rollmesh top``, and their sources."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.cli.top_view import rollout_line, screen, sparkline
from rollmesh.gateway.models.live import (
    DropView,
    GeneratorView,
    MemoryView,
    Overview,
    Rates,
    RolloutSpan,
    Series,
    Staleness,
    StalenessBin,
    Timeline,
    VersionInterval,
)


def overview(**changes: Any) -> Overview:
    generator = GeneratorView(
        instance_id="a", address="127.0.0.1:7000", policy_version=6, versions_behind=1, serving=False,
        reason="loading [version 7]", running=0, waiting=3, slots=32, kv_token_capacity=1000,
        kv_tokens_used=930, preemptions=17,
    )  # fmt: skip
    values: dict[str, Any] = {
        "run": "demo",
        "time": 100.0,
        "age_seconds": 0.1,
        "state": "running",
        "waiting_for": "2 more ready groups of 4",
        "paused_by_person": False,
        "train_step": 7,
        "train_steps": 40,
        "cut_step": 7,
        "newest_version": 7,
        "newest_train_step": 7,
        "pinned_version": 5,
        "rollback_to": None,
        "pool_size": 24,
        "trajectories": {"pending": 2, "leased": 20},
        "groups": {"open": 6, "ready": 2},
        "staleness": Staleness(bound=4, queue=[StalenessBin(staleness=1, count=9)], trained=[]),
        "drops": [DropView(reason="straggler_timeout", groups=3, tokens=99)],
        "waste": (),
        "generators": [generator],
        "generator_count": 40,
        "evaluations": [],
        "memory": MemoryView(used_bytes=12_000_000, max_bytes=1_000_000_000, ratio=0.25),
        "rates": Rates(saved_tokens_per_second=4321.0, finished_per_second=1.5, trained_groups_per_second=0.1),
        "report": None,
        "totals": {},
        "workers": 1,
        "dead_letters": 2,
        "services": [],
    }
    return Overview(**{**values, **changes})


def span(identity: str, **changes: Any) -> RolloutSpan:
    values: dict[str, Any] = {
        "id": identity, "start": 20.0, "end": None, "state": "leased", "worker": "rollout-0", "generator": None,
        "birth_version": 3, "tokens": 128,
        "intervals": [
            VersionInterval(policy_version=3, start=20.0, end=60.0, tokens=64),
            VersionInterval(policy_version=4, start=60.0, end=100.0, tokens=64),
        ],
    }  # fmt: skip
    return RolloutSpan(**{**values, **changes})


def timeline(*spans: RolloutSpan, in_flight: int = 1) -> Timeline:
    return Timeline(time=100.0, window_seconds=120.0, in_flight=in_flight, left_out=0, rollouts=list(spans))


def drawn(shown: RenderableType, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_screen_tells_what_the_page_tells() -> None:
    curve = Series(
        name="reward_mean", unit="reward", axis="train_step", x=[1, 2], mean=[0.1, 0.9], low=[0, 0], high=[1, 1]
    )
    text = drawn(screen(overview(), timeline(span("e0-3.1"), in_flight=20), [curve], rollouts=5, note="q quits"))
    for part in (
        "rollmesh demo", "running", "2 more ready groups of 4", "7 of 40", "7, pinned to 5", "4,321 tokens/s",
        "12 MB, 25.0% of its limit", "20 of 24", "dropped: straggler timeout", "dead letters", "127.0.0.1:7000",
        "loading [version 7]", "93%", "17", "and 39 more", "reward mean", "0.9 reward", "▁█", "e0-3.1",
        "and 19 more", "q quits",
    ):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    text = drawn(screen(overview(), timeline(span("e0-3.1")), [], rollouts=5), width)
    assert max(map(len, text.splitlines())) <= width


def test_numbers_from_before_an_outage_say_how_old_they_are() -> None:
    text = drawn(screen(overview(state="unreachable", age_seconds=42.0), timeline(), [], rollouts=0))
    assert "unreachable, as of 42 s ago" in text


def test_a_timeline_row_is_coloured_by_version_from_its_start_to_now() -> None:
    text = rollout_line(span("a.0"), -20.0, 100.0)
    assert len(text.plain) == 60
    assert text.plain[:20].strip() == ""
    assert set(text.plain[20:]) == {"━"}
    styles = {part.start: str(part.style) for part in text.spans}
    first, second = [{styles[at] for at in cells} for cells in (range(20, 40), range(40, 60))]
    assert len(first) == len(second) == 1
    assert first != second


def test_a_timeline_row_outside_of_the_window_is_empty_and_an_empty_window_is_drawn() -> None:
    gone = span("a.0", start=-100.0, end=-60.0, intervals=[])
    assert rollout_line(gone, -20.0, 100.0).plain[1:].strip() == ""
    assert rollout_line(span("a.0"), 100.0, 100.0).plain.strip() == ""


def test_a_sparkline_shows_the_newest_values_and_needs_no_range() -> None:
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([0.0, 1.0, 2.0]) == "▁▅█"
    assert len(sparkline([float(x) for x in range(500)])) == 40


def test_top_says_what_is_missing(tmp_path: Path) -> None:
    nothing = CliRunner().invoke(app, ["top"])
    assert nothing.exit_code == 2
    assert "name a run folder, or the gateway's address with --url" in nothing.stderr
    no_run = CliRunner().invoke(app, ["top", str(tmp_path)])
    assert no_run.exit_code == 2
    assert "is this a run folder?" in no_run.stderr


def test_words_of_others_reach_the_terminal_as_words() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J[bold]gone\x9b31m"
    shown = overview(
        run=evil, waiting_for=evil, drops=[DropView(reason=evil, groups=1, tokens=1)],
        generators=[
            GeneratorView(
                instance_id="a", address=evil, policy_version=6, versions_behind=1, serving=False, reason=evil,
                running=0, waiting=3, slots=32, kv_token_capacity=1000,
            )
        ],
    )  # fmt: skip
    text = drawn(screen(shown, timeline(span(evil)), [], rollouts=5, note=evil), 300)
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
    assert text.count("[bold]gone") == 7


@pytest.fixture
def outsider() -> Iterator[str]:
    """A web server that is no gateway and answers everything."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"hello": "world"}')

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_top_says_what_answers_that_is_no_gateway(outsider: str) -> None:
    asked = CliRunner().invoke(app, ["top", "--url", outsider, "--once"])
    assert asked.exit_code == 2, asked.output
    assert f"{outsider}/api/v1/overview: no rollmesh gateway of this version answers there" in asked.stderr
    wrong = CliRunner().invoke(app, ["top", "--url", "http://[::1", "--once"])
    assert wrong.exit_code == 2, wrong.output
    assert "http://[::1/api/v1/overview" in wrong.stderr
