"""Commands that read a run: eval, explain, audit, report, view, compare."""

import json
import webbrowser
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.common import (
    JsonOption,
    RunFolderArgument,
    SetOption,
    VersionOption,
    clear_errors,
    run_async,
    run_of,
    shutdown_event,
    store_of,
)
from rollmesh.errors import ConfigError, StoreUnavailable
from rollmesh.launcher.run_up import queue_account
from rollmesh.report.console import domain_scores, output_console, plus_minus, print_line
from rollmesh.report.ledger_check import QueueAccount
from rollmesh.report.recorded_run import Evaluation, RecordedRun
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.locks import has_launcher


def eval_(
    run: RunFolderArgument,
    version: VersionOption = None,
    data: Annotated[
        Path | None, typer.Option(help="Other prompts: a JSON-lines or Parquet file.", metavar="FILE")
    ] = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate one policy version of a run: of a stopped run, on its fixed evaluation prompts, or on others.

    A run in progress evaluates versions itself with `evaluation.every_versions`. With --data or --set a mesh of its own
    evaluates, beside the run, of which only the checkpoints are read; its score is printed and not recorded.
    The exit status is 1 when none of the answers counts: there is no score then (null in JSON).

    Example: `rollmesh eval runs/demo --version 10 --data hard.jsonl --set evaluation.temperature=0`
    """
    from rollmesh.launcher.evaluations import evaluate_beside, evaluate_run, source_of

    async def main() -> None:
        config, folder = run_of(run)
        shutdown, console = shutdown_event(), output_console(stderr=as_json)  # standard output has the JSON
        if data is not None or set_:
            source = [] if data is None else [f"data.evaluation_source={json.dumps(source_of(config, data))}"]
            result = await evaluate_beside(folder, [*source, *(set_ or [])], version, shutdown, console)
        else:
            result = await evaluate_run(config, folder, version, shutdown, console)
        _print_score(result, as_json=as_json)
        if not result.n:
            raise typer.Exit(1)

    run_async(main)


def _print_score(result: Evaluation, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(result) | ({} if result.n else {"mean": None})))
        return
    shortage = f"; {result.shortage}" if result.shortage else ""
    score = f"{result.mean:.4f} {plus_minus(result.standard_error, '.4f')} (n={result.n}){shortage}"
    typer.echo(f"policy version {result.policy_version}: {score if result.n else result.description}")
    for line in domain_scores(result.domains):
        typer.echo(f"  {line}")


def explain(
    run: RunFolderArgument,
    train_step: Annotated[
        int | None,
        typer.Argument(
            help="Train step of the batch; without it, --trajectory is looked up.", min=1, metavar="TRAIN_STEP"
        ),
    ] = None,
    trajectory: Annotated[str | None, typer.Option(help="Only this trajectory; without a step, or this group.")] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of trajectories shown.", min=1)] = 1,
    as_json: JsonOption = False,
) -> None:
    """Explain a batch token by token: version, ratio, weight, and the reason for each clipped or masked token.

    Notes mark values that differ from training: old logprobs that are not kept, and minibatches after the first.
    Without a train step, show where a trajectory or a group is, its round and plan, its outcome and its shaped reward,
    and whether it was restarted, set aside or cut off, or rests.

    Example: `rollmesh explain runs/demo 5 --limit 3`
    """
    if train_step is None:
        _explain_status(run, trajectory, as_json)
        return
    from rollmesh.report.batch_explanation import explain_batch

    with clear_errors():
        _, folder = run_of(run)
        explain_batch(
            folder.path, train_step, trajectory_id=trajectory, limit=limit, as_json=as_json, console=output_console()
        )


def _explain_status(run: Path, name: str | None, as_json: bool) -> None:
    from rollmesh.report.audit import open_checkpoints
    from rollmesh.report.trajectory_status import trajectory_statuses

    async def main() -> None:
        if name is None:
            raise ConfigError("explain: give the train step of a batch, or --trajectory with a trajectory or a group")
        async with store_of(run) as (_, folder, store):
            statuses = await trajectory_statuses(store, open_checkpoints(RecordedRun(folder.path)), name)
        if as_json:
            typer.echo(json.dumps([asdict(status) for status in statuses]))
            return
        for status in statuses:
            typer.echo(status.line())

    run_async(main)


def audit(run: RunFolderArgument, as_json: JsonOption = False) -> None:
    """Check a run: nothing lost, nothing trained twice, no staleness violation, every logprob reproducible.

    Each segment from a single policy version is scored again with its checkpoint. The exit status is 1 when a check
    fails, or when less than half of the policy's tokens could be scored again (the result is incomplete).

    Example: `rollmesh audit runs/demo`
    """
    from rollmesh.report.audit import audit_run, print_audit

    console = output_console(stderr=as_json)  # standard output has the JSON

    async def read_account() -> tuple[Path, QueueAccount | None]:
        _, folder = run_of(run)
        try:
            async with store_of(run) as (_, _, store):
                return folder.path, await queue_account(store)
        except StoreUnavailable as error:
            print_line(console, f"lost groups are not checked: {error}")
            return folder.path, None

    folder, account = run_async(read_account)
    with clear_errors():
        result = audit_run(folder, account, console)
    if as_json:
        typer.echo(result.to_json(indent=None))
    else:
        print_audit(result, console)
    if not result.green:
        raise typer.Exit(1)


def report(run: RunFolderArgument) -> None:
    """Write the report of a run folder again: report.html, the page of the run in one file.

    Example: `rollmesh report runs/demo`
    """
    from rollmesh.report.report_file import write_report

    with clear_errors():
        _, folder = run_of(run)
        typer.echo(write_report(folder.path))


def view(
    run: RunFolderArgument,
    port: Annotated[
        int, typer.Option(help="Port of the page on this machine; 0 picks a free one.", min=0, max=65535)
    ] = 0,
    beside: Annotated[
        Path | None,
        typer.Option(
            help="Run folder of a second run, whose curves are drawn beside; those of a run in progress end at the "
            "start of this command.",
            metavar="RUN_FOLDER",
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Open the page of a run that has ended, read-only: curves, versions, trained trajectories, audit, report.

    Needs the run folder only, no Redis and no service.

    Example: `rollmesh view runs/demo --open`
    """
    from rollmesh.report.view.view_server import serve_view

    def ready(link: str) -> None:
        typer.echo(f"the run as a page: {link}\nCtrl-C ends it")
        if open_:
            webbrowser.open(link)

    async def main() -> None:
        others = [RecordedRun(run_of(beside)[1].path)] if beside else []
        config, folder = run_of(run)  # last: modules of this run are found, not those of the other one
        if has_launcher(folder.path):
            pages = [page.url for page in read_endpoints(folder.path, "gateway")]
            where = f"its page: {pages[0]}" if pages else "it has no page (gateway.enabled)"
            state = f"rollmesh status {folder.path} shows its state"
            raise ConfigError(f"{folder.path}: the run is in progress; {where}; {state}")
        await serve_view(RecordedRun(folder.path), config, port, shutdown_event(), ready, others)

    run_async(main)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, two or more.", metavar="RUN_FOLDER RUN_FOLDER...")],
) -> None:
    """Print a table of runs: score before and after, train steps, time, tokens, staleness, audit, and their difference.

    The difference is that of the first run to each other one, after training. A run in progress counts as it is now.

    Example: `rollmesh compare runs/copris runs/sync`
    """
    from rollmesh.report.compare import compare as compared
    from rollmesh.report.compare import print_comparison

    with clear_errors():
        folders = [run_of(run)[1].path for run in runs]
        if len(set(folders)) < 2 or len(set(folders)) < len(folders):
            raise ConfigError(f"compare {' '.join(map(str, runs))}: give two or more runs, each of them once")
        names = [folder.name for folder in folders]
        labels = names if len(set(names)) == len(names) else list(map(str, folders))
        print_comparison(
            compared({label: [path] for label, path in zip(labels, folders, strict=True)}), output_console()
        )
