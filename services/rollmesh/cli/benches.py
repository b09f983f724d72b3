"""``rollmesh bench NAME``: measured ratios against named baselines, in one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollmesh.bench.measure import Measure, missed
from rollmesh.cli.common import JsonOption, clear_errors, heavy_module
from rollmesh.report.console import output_console


class Bench(StrEnum):
    """Available benches; each one is the module ``rollmesh.bench.<name>``."""

    ENGINE = "engine"
    TRAIN = "train"
    QUEUE = "queue"
    SCALE = "scale"
    RELOAD = "reload"
    CHAOS = "chaos"
    FUZZ = "fuzz"
    GPU = "gpu"
    SGLANG = "sglang"


def register(app: typer.Typer) -> None:
    """Add the bench command."""
    app.command("bench", rich_help_panel="Inspection")(bench)


def bench(
    name: Annotated[Bench, typer.Argument(help="Bench to run.")],
    as_json: JsonOption = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions, to check that the bench runs.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with status 1 when a bar is missed.")] = False,
    rounds: Annotated[int | None, typer.Option(help="chaos: rounds; default: each fault once.", min=1)] = None,
    fault: Annotated[str | None, typer.Option(help="chaos: run only this fault.")] = None,
    requests: Annotated[int, typer.Option(help="fuzz: number of requests.", min=1)] = 100_000,
    seed: Annotated[int, typer.Option(help="fuzz: seed of the requests.", min=0)] = 20261122,
    curve_only: Annotated[bool, typer.Option("--curve-only", help="gpu: only the step-time curve of decode.")] = False,
    pool: Annotated[list[int] | None, typer.Option(help="gpu: pool_size of a copris_paper arm; repeatable.")] = None,
    updates: Annotated[int | None, typer.Option(help="gpu: measured updates per arm.", min=1)] = None,
    cuda_graphs: Annotated[bool | None, typer.Option(help="gpu: decode with CUDA graphs or without.")] = None,
    output: Annotated[Path | None, typer.Option(help="gpu: folder of the JSON results.")] = None,
    python: Annotated[Path | None, typer.Option(help="sglang: Python interpreter that has SGLang.")] = None,
    url: Annotated[str | None, typer.Option(help="sglang: URL of a running server of that model.")] = None,
    model: Annotated[Path | None, typer.Option(help="sglang: Hugging Face folder; default: demo model.")] = None,
    level: Annotated[list[int] | None, typer.Option(help="scale: rollouts in flight; repeatable.", min=1)] = None,
    mean_tokens: Annotated[int, typer.Option(help="scale: mean tokens of an emulated answer.", min=8)] = 2048,
    chunk_tokens: Annotated[int, typer.Option(help="scale: tokens per chunk of an emulated stream.", min=1)] = 512,
    baseline: Annotated[
        Path | None, typer.Option(help="scale: services folder of another build, measured alternately with this one.")
    ] = None,
) -> None:
    """Measure one part of the mesh against a named baseline in the same run; --json prints one object per measure.

    The table shows the bars of each measure; --check requires all of them.
    """
    options: dict[str, object] = {"quick": quick}
    if name is Bench.CHAOS:
        options |= {"rounds": rounds, "fault": fault}
    if name is Bench.FUZZ:
        options |= {"requests": requests, "seed": seed}
    if name is Bench.GPU:
        options |= {"curve_only": curve_only, "pools": pool or (), "updates": updates, "cuda_graphs": cuda_graphs}
        options["output"] = output
    if name is Bench.SGLANG:
        options |= {"python": None if python is None else str(python), "url": url, "model": model}
    if name is Bench.SCALE:
        options |= {"levels": level or (), "mean_tokens": mean_tokens, "chunk_tokens": chunk_tokens}
        options["baseline"] = baseline
    with clear_errors():
        measures = heavy_module(f"rollmesh.bench.{name.value}", f"bench {name.value}").run(**options)
    if as_json:
        for measure in measures:
            typer.echo(json.dumps(measure.figures()))
    else:
        output_console().print(measures_table(measures, f"bench {name.value}"))
    if check and (lines := missed(measures)):
        console = Console(stderr=True, soft_wrap=True)
        for line in lines:
            console.print(Text(f"missed: {line}", style="red"))
        raise typer.Exit(1)


def measures_table(measures: Sequence[Measure], title: str) -> Table:
    """Return a table with one row per measure and its bars."""
    table = Table("measure", "value", "unit", "baseline", "baseline value", "ratio", "bar", title=title)
    for m in measures:
        ratio = "" if m.ratio is None else f"{m.ratio:.2f}"
        base = "" if m.baseline_value is None else f"{m.baseline_value:,.3f}"
        bars = Text(", ").join(Text(str(bar), style="" if bar.reached_by(m) else "red") for bar in m.bars)
        if missed([m]):
            bars.append(": MISSED", style="red")
        table.add_row(m.name, f"{m.value:,.3f}", m.unit, m.baseline or "", base, ratio, bars)
    return table
