"""``rollmesh bench``: one command per bench; each measures ratios against named baselines in one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollmesh.bench.measure import Measure, missed
from rollmesh.cli.common import JsonOption, clear_errors, heavy_module
from rollmesh.cli.plain_help import PlainGroup
from rollmesh.report.console import output_console

QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer repetitions, to check that the bench runs.")]
CheckOption = Annotated[bool, typer.Option("--check", help="Exit with status 1 when a bar is missed.")]
Levels = Annotated[list[int] | None, typer.Option("--level", help="Rollouts in flight; repeatable.", min=1)]
Pools = Annotated[list[int] | None, typer.Option("--pool", help="pool_size of a copris_paper arm; repeatable.")]

app = typer.Typer(
    help="Measure one part of the mesh against a named baseline in the same run.\n\n"
    "--json prints one object per measure. The table shows the bars of each measure; --check requires all of them.",
    no_args_is_help=True,
    cls=PlainGroup,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Common output options of the benches."""

    as_json: bool
    check: bool

    def run(self, name: str, **options: object) -> None:
        """Run ``rollmesh.bench.<name>`` and print its measures; exit with status 1 for a missed bar if required."""
        with clear_errors():
            measures: list[Measure] = heavy_module(f"rollmesh.bench.{name}", f"bench {name}").run(**options)
        if self.as_json:
            for measure in measures:
                typer.echo(json.dumps(measure.figures()))
        else:
            output_console().print(measures_table(measures, f"bench {name}"))
        if self.check and (lines := missed(measures)):
            console = Console(stderr=True, soft_wrap=True)
            for line in lines:
                console.print(Text(f"missed: {line}", style="red"))
            raise typer.Exit(1)


_PLAIN = {
    "train": "Measure a train step on ragged trajectories beside padded micro-batches.",
    "old-logprob-cost": "Measure a train step with loglinear beside recompute, and the difference of their ratios.",
    "queue": "Measure full lives of trajectories in the queue beside a bare Redis stream.",
    "schedules": "Measure the leader's decisions, the choice of a generator, and the reading of a mesh view.",
    "deltas": "Measure bytes and seconds of a policy version as a delta beside full weights, over a slow link.",
}
"""Benches without options of their own."""


def _plain(name: str) -> Callable[..., None]:
    def command(as_json: JsonOption = False, quick: QuickOption = False, check: CheckOption = False) -> None:
        Output(as_json=as_json, check=check).run(name.replace("-", "_"), quick=quick)

    return command


for _name, _help in _PLAIN.items():
    app.command(_name, help=f"{_help}\n\nExample: `rollmesh bench {_name} --quick`")(_plain(_name))


@app.command()
def engine(
    as_json: JsonOption = False,
    quick: QuickOption = False,
    check: CheckOption = False,
    save: Annotated[
        Path | None, typer.Option(help="JSON file for a curve of decode steps, for rollmesh sim.", dir_okay=False)
    ] = None,
) -> None:
    """Measure the torch engine beside Hugging Face generate, in tokens per CPU second.

    Example: `rollmesh bench engine --quick`
    """
    Output(as_json=as_json, check=check).run("engine", quick=quick, save=save)


@app.command()
def reload(
    as_json: JsonOption = False,
    quick: QuickOption = False,
    check: CheckOption = False,
    size: Annotated[
        str | None, typer.Option(help="Measure one model of about this size instead, for example 1GiB.")
    ] = None,
) -> None:
    """Measure the time from publishing a policy to serving it, and the pause of running calls.

    Example: `rollmesh bench reload --size 64MiB`
    """
    Output(as_json=as_json, check=check).run("reload", quick=quick, size=size)


@app.command()
def chaos(
    as_json: JsonOption = False,
    quick: QuickOption = False,
    check: CheckOption = False,
    rounds: Annotated[int | None, typer.Option(help="Rounds; default: each fault once.", min=1)] = None,
    fault: Annotated[str | None, typer.Option(help="Run only this fault.")] = None,
) -> None:
    """Run short runs with one fault each, and audit every run.

    Example: `rollmesh bench chaos --quick`
    """
    Output(as_json=as_json, check=check).run("chaos", quick=quick, rounds=rounds, fault=fault)


@app.command()
def fuzz(
    as_json: JsonOption = False,
    quick: QuickOption = False,
    check: CheckOption = False,
    requests: Annotated[int, typer.Option(help="Number of requests.", min=1)] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of the requests.", min=0)] = 20261122,
) -> None:
    """Send random requests to every port of a training run, and check its services.

    Example: `rollmesh bench fuzz --quick`
    """
    Output(as_json=as_json, check=check).run("fuzz", quick=quick, requests=requests, seed=seed)


@app.command()
def scale(
    as_json: JsonOption = False,
    quick: QuickOption = False,
    check: CheckOption = False,
    level: Levels = None,
    mean_tokens: Annotated[int, typer.Option(help="Mean tokens of an emulated answer.", min=8)] = 2048,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens per chunk of an emulated stream.", min=1)] = 512,
    baseline: Annotated[
        Path | None, typer.Option(help="Services folder of another build, measured alternately with this one.")
    ] = None,
) -> None:
    """Measure the CPU time per finished trajectory of a mesh at increasing numbers of rollouts in flight.

    Example: `rollmesh bench scale --level 512`
    """
    options = {"levels": level or (), "mean_tokens": mean_tokens, "chunk_tokens": chunk_tokens, "baseline": baseline}
    Output(as_json=as_json, check=check).run("scale", quick=quick, **options)


@app.command()
def gpu(
    as_json: JsonOption = False,
    quick: QuickOption = False,
    check: CheckOption = False,
    pool: Pools = None,
    updates: Annotated[int | None, typer.Option(help="Measured updates per arm.", min=1)] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the JSON results.")] = None,
) -> None:
    """Measure sync beside copris_paper on one shared GPU, and the step-time curve of decode.

    Example: `rollmesh bench gpu`
    """
    Output(as_json=as_json, check=check).run("gpu", quick=quick, pools=pool or (), updates=updates, output=output)


@app.command(name="sim-check")
def sim_check(
    as_json: JsonOption = False,
    quick: QuickOption = False,
    check: CheckOption = False,
    arm: Annotated[list[str] | None, typer.Option(help="Predicted preset; repeatable.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each arm and setting.", min=1)] = None,
    updates: Annotated[int | None, typer.Option(help="Train steps of a run that are measured.", min=2)] = None,
    output: Annotated[Path | None, typer.Option(help="New folder for the run folders.")] = None,
) -> None:
    """Measure real runs beside the simulator, which is calibrated on the runs of sync.

    Example: `rollmesh bench sim-check`
    """
    options = {"arms": arm or (), "seeds": seeds, "updates": updates, "output": output}
    Output(as_json=as_json, check=check).run("sim_check", quick=quick, **options)


@app.command()
def sglang(
    as_json: JsonOption = False,
    quick: QuickOption = False,
    check: CheckOption = False,
    python: Annotated[Path | None, typer.Option(help="Python interpreter that has SGLang.")] = None,
    url: Annotated[str | None, typer.Option(help="URL of a running server of that model.")] = None,
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder; default: demo model.")] = None,
) -> None:
    """Measure the cost of the generator on top of its SGLang server.

    Example: `rollmesh bench sglang`
    """
    options = {"python": None if python is None else str(python), "url": url, "model": model}
    Output(as_json=as_json, check=check).run("sglang", quick=quick, **options)


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
