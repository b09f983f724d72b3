"""Section of docs/simulator-published.md that compares the simulator with published speed-ups; `make sim-fidelity`."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from textwrap import fill
from typing import Any

from benchmarks.published.predictions import (
    GPU,
    ORDERED_SYSTEMS,
    Prediction,
    leave_one_out,
    log_error,
    ordered_pairs,
)
from benchmarks.published.speed_ups import PublishedSetup, PublishedSpeedUp, Quantity
from rollmesh.errors import ConfigError

BEGIN = "<!-- written by: make sim-fidelity -->"
END = "<!-- end of the written part -->"


def fidelity_section(rows: Sequence[PublishedSpeedUp], found: Sequence[Prediction]) -> str:
    """Return the tables as Markdown."""
    in_bar = [each for each in found if each.published.is_in_bar]
    lines = [
        *_row_table(in_bar),
        "",
        "| system | rows | mean error | leave one out |",
        "|---|---|---|---|",
        *_means(in_bar),
        "",
        *(f"* {line}" for line in _orders(found)),
        "",
        "| not predicted | over | evidence | published | missing |",
        "|---|---|---|---|---|",
        *(
            f"| {row.name} | {row.baseline} | {row.evidence.value} | {row.speed_up:.2f} | {row.remark} |"
            for row in rows
            if row.setup is None
        ),
        "",
        *_sources(rows),
        "",
        "### Further rows",
        "",
        "Rows beside those of the bar. Leave one out knows all other rows here.",
        "",
        *_row_table([each for each in found if not each.published.is_in_bar]),
        "",
        *_means_of_all(found),
    ]
    return "\n".join(lines) + "\n"


def _row_table(found: Sequence[Prediction]) -> Iterator[str]:
    yield "| row | over | set-up | evidence | published | simulated | error | leave one out | error |"
    yield "|---|---|---|---|---|---|---|---|---|"
    yield from map(row_line, found)


def row_line(each: Prediction) -> str:
    """Return the line of a predicted row."""
    row = each.published
    setup = "" if row.setup is None else _setup(row.setup)
    what = "" if row.quantity is Quantity.TIME else f" ({row.quantity})"
    cells = (
        row.name,
        f"{row.baseline}{what}",
        setup,
        row.evidence.value,
        f"{row.speed_up:.2f}",
        f"{each.simulated:.2f}",
        f"{each.error:.2f}",
        f"{each.leave_one_out:.2f}",
        f"{each.leave_one_out_error:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def documents(found: Sequence[Prediction]) -> Iterator[dict[str, Any]]:
    """Yield one object per predicted row for JSON."""
    for each in found:
        yield {
            "row": each.published.name,
            "in_bar": each.published.is_in_bar,
            "published": each.published.speed_up,
            "simulated": each.simulated,
            "error": each.error,
            "leave_one_out": each.leave_one_out,
            "leave_one_out_error": each.leave_one_out_error,
        }


def with_section(document: str, section: str) -> str:
    """Return a document with the section between its marks. Raises ConfigError if it lacks the marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"document without the lines {BEGIN} and {END}; give docs/simulator-published.md")
    return f"{before}{BEGIN}\n\n{section}\n{END}{after}"


def _setup(setup: PublishedSetup) -> str:
    gpus = " over ".join(
        f"`{arm.preset}`{' with drafts' if arm.drafts else ''} {arm.generator_gpus}"
        + (f" + {arm.trainer_gpus}" if arm.trainer_gpus else "")
        for arm in (setup.method, setup.baseline)
    )
    gpu = setup.gpu or f"{GPU} (assumed)"
    return f"{gpus} {gpu}, {setup.model}, {setup.groups_per_batch} x {setup.group_size}, {setup.response_tokens:,}"


def _means(found: Sequence[Prediction]) -> Iterator[str]:
    systems = dict.fromkeys(each.published.system for each in found)
    of_systems = [(name, [each for each in found if each.published.system == name]) for name in systems]
    for name, members in (*of_systems, ("**rows of the bar**", found)):
        simulated, other = fmean(each.error for each in members), fmean(each.leave_one_out_error for each in members)
        yield f"| {name} | {len(members)} | {simulated:.3f} | {other:.3f} |"


def _means_of_all(found: Sequence[Prediction]) -> Iterator[str]:
    """Yield the mean errors over all rows, with the predictor that knows all of them but one."""
    published = [each.published.speed_up for each in found]
    other = fmean(map(log_error, leave_one_out(published), published))
    yield "| rows | mean error | leave one out |"
    yield "|---|---|---|"
    yield f"| all {len(found)} | {fmean(each.error for each in found):.3f} | {other:.3f} |"


def _orders(found: Sequence[Prediction]) -> Iterator[str]:
    for system in ORDERED_SYSTEMS:
        pairs = list(ordered_pairs(found, system))
        wrong = [f"{low.published.row} below {high.published.row}" for low, high, right in pairs if not right]
        rest = f"; not: {', '.join(wrong)}" if wrong else ""
        yield f"Order of the rows of {system}: {len(pairs) - len(wrong)} of {len(pairs)} pairs right{rest}."


def _sources(rows: Sequence[PublishedSpeedUp]) -> Iterator[str]:
    """Yield a sentence for each source of a system, with the remarks about its rows."""
    systems = dict.fromkeys(row.system for row in rows if row.setup is not None)
    for system in systems:
        of_system = [row for row in rows if row.system == system]
        sources = dict.fromkeys(row.source for row in of_system)
        remarks = dict.fromkeys(row.remark for row in of_system)
        line = f"* **{system}**: {'; '.join([*sources, *remarks])}."
        yield fill(line, 120, subsequent_indent="  ", break_on_hyphens=False)
