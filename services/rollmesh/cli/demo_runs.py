"""Short runs of the demo's task, one per setting that is compared; shared by the commands ``demo-*``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from rollmesh.cli.common import EXIT_STOPPED
from rollmesh.cli.up import run_to_report
from rollmesh.config import load_run_config, text_override
from rollmesh.config.recipes import recipe_file
from rollmesh.errors import ConfigError, RollmeshError
from rollmesh.launcher.inline_services import INLINE_OVERRIDES

if TYPE_CHECKING:
    from rollmesh.report.demo_results import DemoResult

_BASE = ("schedule.pool_size=null", "schedule.max_staleness=null", "evaluation.before_and_after=false")
_ONE_REPLICA = ("generator.replicas=1",)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRuns:
    """Common settings of the runs of one command."""

    root: Path
    """Parent of the run folders."""
    updates: int
    """Train steps of each run."""
    settings: Sequence[str]
    """Overrides of the user, stronger than those that go with a run."""
    inline: bool
    """Services of a run are tasks of this process."""

    def results(self, runs: Mapping[str, Sequence[str]], console: Console) -> list[DemoResult]:
        """Run the demo once per name, with its ``a.b=c`` overrides, in the folder of that name below ``root``.

        A failed run is a result too; a stop by the user ends the command.
        """
        return [self._result(name, overrides, console) for name, overrides in runs.items()]

    def _result(self, name: str, overrides: Sequence[str], console: Console) -> DemoResult:
        """Make one run: failed if it was refused, and without a rate if it has steps of an earlier command."""
        from rollmesh.report.demo_results import demo_result

        console.print(name, style="bold", highlight=False)
        path = self.root / name
        continued = (path / "metrics.jsonl").exists()
        accepted = self._run([*self._overrides(name, path), *overrides, *self.settings], console)
        path.mkdir(parents=True, exist_ok=True)
        result = demo_result(path, name, self.updates)
        result = replace(result, updates_per_second=None) if continued else result
        return result if accepted else replace(result, audit="refused")

    def _overrides(self, name: str, path: Path) -> list[str]:
        inline = (*INLINE_OVERRIDES, *_ONE_REPLICA) if self.inline else ()
        run_name = f"demo-{name.replace('_', '-').replace('/', '-')}"
        named = (f"name={run_name}", text_override("folder", path))
        return [*_BASE, *inline, f"trainer.train_steps={self.updates}", *named]

    def _run(self, overrides: Sequence[str], console: Console) -> bool:
        """Run and print why a run failed; False for a run whose folder or settings are refused."""
        try:
            config = load_run_config(recipe_file("countdown", "demo.yaml"), overrides)
            status = run_to_report(config, console, inline=self.inline)
        except RollmeshError as error:
            console.print(f"[red]error[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
            return not isinstance(error, ConfigError)
        if status == EXIT_STOPPED:
            raise typer.Exit(status)
        return True


def print_count(results: Sequence[DemoResult], things: str, console: Console) -> None:
    """Print the number of runs that passed; raises typer.Exit with status 1 unless all did."""
    passed = sum(result.passed for result in results)
    style = "bold green" if passed == len(results) else "bold red"
    console.print(f"{passed} of {len(results)} {things}: all updates, audit green", style=style, highlight=False)
    raise typer.Exit(0 if passed == len(results) else 1)
