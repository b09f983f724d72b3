"""The page's modules that decide something, run where they run: in the browser."""

import itertools
import random
from collections.abc import Callable
from typing import Any

from .conftest import Window

Open = Callable[..., Window]

PACK = """async (looks) => {
  const { Lanes } = await import("/page/lanes.js");
  const lanes = new Lanes();
  lanes.reset(looks[0].changed);
  return looks.map(({ changed, removed }, at) => {
    if (at > 0) lanes.apply(changed, removed);
    return lanes.rows.map((row) => row.map(({ id, start, end }) => [id, start, end]));
  });
}"""


def test_a_lane_never_holds_two_rollouts_at_once_and_nobody_changes_lanes_in_flight(window: Open) -> None:
    rng = random.Random(3)
    looks, alive = _looks(rng, 200)
    packed = window().open().evaluate(PACK, looks)
    lane_of: dict[str, int] = {}
    for look, rows, expected in zip(looks, packed, alive, strict=True):
        shown = {span[0]: lane for lane, row in enumerate(rows) for span in row}
        assert set(shown) == set(expected)
        for row in rows:
            for (_, _, end), (_, start, _) in itertools.pairwise(row):
                assert end is not None and end <= start, row
        again = {span["id"] for span in look["changed"]}
        for name, lane in shown.items():
            assert name in again or lane_of.get(name, lane) == lane
        lane_of = shown
    flying = max(sum(span["end"] is None for span in look.values()) for look in alive)
    assert max(len(rows) for rows in packed) <= 2 * flying


RAMP = """async ([low, high]) => {
  const { Ramp } = await import("/page/palette.js");
  const ramp = new Ramp(low, high);
  return Array.from({ length: high - low + 1 }, (_, at) => ramp.colour(low + at));
}"""


def test_neighbouring_versions_of_a_long_run_differ_and_no_colour_repeats(window: Open) -> None:
    page = window().open()
    for last in (8, 16, 17, 200):
        colours = page.evaluate(RAMP, [0, last])
        assert len(set(colours)) == last + 1
        parts = [[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in colours]
        apart = [sum(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(parts)]
        assert min(apart) > 15, (last, apart)


def _looks(rng: random.Random, count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Random looks, and what is known after each: rollouts start, end, start again after a rest, and are forgotten."""
    spans: dict[str, Any] = {}
    looks, alive = [], []
    for now in range(count):
        removed = [i for i, s in spans.items() if s["end"] is not None and s["end"] < now - 10]
        for name in removed:
            del spans[name]
        changed: dict[str, Any] = {}
        for name, span in spans.items():
            if span["end"] is None and rng.random() < 0.2:
                changed[name] = {**span, "end": now}
            elif span["end"] is not None and rng.random() < 0.05:
                changed[name] = {**span, "start": now, "end": None}
        for number in range(rng.randrange(6)):
            name = f"r{now}.{number}"
            changed[name] = {"id": name, "start": now, "end": None, "intervals": []}
        spans |= changed
        looks.append({"changed": list(changed.values()), "removed": removed})
        alive.append(dict(spans))
    return looks, alive


DOMAINS = """async (overviews) => {
  const { DomainTable } = await import("/page/domains.js");
  const table = new DomainTable();
  return overviews.map((overview) => {
    table.render(overview);
    const box = document.getElementById("domain-table");
    const rows = [...[...box.querySelectorAll("table")].at(-1).querySelectorAll("tbody tr")];
    return {
      hidden: document.getElementById("domains").hidden,
      rows: rows.map((row) => [...row.children].map((cell) => cell.textContent)),
      note: [...box.querySelectorAll(".note")].at(-1).textContent,
    };
  });
}"""


def test_domains_have_a_table_in_a_run_that_has_domains(window: Open) -> None:
    short = {"domain": "short", "drawn": 1419, "completed": 2838, "solved": 1760, "tokens": 83_786}
    new = {"domain": "new", "drawn": 3, "completed": 0, "solved": 0, "tokens": 0}
    none, two = (
        window()
        .open()
        .evaluate(DOMAINS, [{"domains": [], "domain_count": 0}, {"domains": [short, new], "domain_count": 4}])
    )
    assert (none["hidden"], none["rows"]) == (True, [])
    assert (two["hidden"], two["note"]) == (False, "and 2 more domains")
    assert two["rows"] == [
        ["short", "1,419", "2,838 (100%)", "62%", "83,786", "30"],
        ["new", "3", "0 (0%)", "\N{EN DASH}", "0", "\N{EN DASH}"],
    ]


def test_events_are_read_however_the_stream_is_cut(window: Open) -> None:
    stream = (
        ': hello\n\nid: 7\nevent: tick\ndata: {"a": 1}\n\nevent: snapshot\ndata: {"b":\ndata: 2}\n\nid: 9\nevent: ti'
    )
    found = (
        window()
        .open()
        .evaluate(
            """async (stream) => {
          const { parseEvents } = await import("/page/stream.js");
          const runs = [];
          for (let size = 1; size < stream.length; size += 1) {
            const events = [];
            let rest = "";
            for (let at = 0; at < stream.length; at += size) {
              rest = parseEvents(rest + stream.slice(at, at + size), (event) => events.push(event));
            }
            runs.push(JSON.stringify([events, rest]));
          }
          return [...new Set(runs)].map((run) => JSON.parse(run));
        }""",
            stream,
        )
    )
    assert found == [
        [
            [{"name": "tick", "id": "7", "data": '{"a": 1}'}, {"name": "snapshot", "id": None, "data": '{"b":\n2}'}],
            "id: 9\nevent: ti",
        ]
    ]


PARTS = """async ([axis, xs]) => {
  const { partsOf } = await import("/page/pauses.js");
  return partsOf(axis, xs, xs);
}"""


def test_a_curve_over_time_has_no_line_through_the_pause_of_a_run(window: Open) -> None:
    page, xs = window().open(), [0, 1, 2, 3, 830, 831, 832]
    assert page.evaluate(PARTS, ["time", xs]) == page.evaluate(PARTS, ["elapsed", xs]) == [xs[:4], xs[4:]]
    assert page.evaluate(PARTS, ["train_step", xs]) == [xs]
    assert page.evaluate(PARTS, ["time", [0, 60, 120, 190]]) == [[0, 60, 120, 190]]
    assert page.evaluate(PARTS, ["time", []]) == [[]]
