"""Commands that inspect or control a run: status, eval, explain, audit, report, pin, rollback."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.markup import escape
from rich.table import Table

from rollmesh.checkpoints.api_token import known_token, page_link
from rollmesh.cli.common import (
    JsonOption,
    RunFolderArgument,
    SetOption,
    clear_errors,
    progress_console,
    run_async,
    run_of,
    shutdown_event,
    store_of,
)
from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError, StoreUnavailable
from rollmesh.launcher.evaluation_journal import Evaluation
from rollmesh.mesh import MeshView
from rollmesh.report.console import output_console
from rollmesh.report.formats import domain_scores, plus_minus
from rollmesh.report.ledger_counts import QueueAccount
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.run_ending import ending
from rollmesh.runtime.endpoints import AdminClient, Endpoint, ServiceStates, read_endpoints
from rollmesh.runtime.locks import distant_launcher, has_launcher
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.scheduling import Schedule
from rollmesh.store import TrajectoryStore
from rollmesh.store.queue_types import WASTE_TOTALS, StoreCounts
from rollmesh.types import GeneratorRecord

_PATIENCE_SECONDS = 3.0
"""Time until ``status`` reports that Redis does not answer."""
VersionOption = Annotated[int | None, typer.Option("--version", help="Policy version; the newest by default.", min=0)]


def status(run: RunFolderArgument, as_json: JsonOption = False) -> None:
    """Show versions, queue, generators and drops of a run, and the addresses of its page and API.

    For a run that is not in progress also its result: finished, failed or stopped, reward, evaluation, audit.

    Example: `rollmesh status runs/demo`
    """
    # The models of the gateway take a tenth of a second to import, which no service needs.
    from rollmesh.gateway.mesh_snapshot import read_snapshot, run_state

    async def main() -> None:
        waits = await _service_waits(run)
        try:
            async with store_of(run, _PATIENCE_SECONDS) as (config, folder, store):
                snapshot = await read_snapshot(store, groups=True)
                waits = {**waits, **await _distant_waits(config, store)}
        except StoreUnavailable:
            for name, wait in waits.items():
                typer.echo(f"{name} waits: {wait}", err=True)
            raise
        view, counts, generators = snapshot.view, snapshot.counts, snapshot.generators
        failure = snapshot.failure or RecordedRun(folder.path).failure
        state, waiting_for = run_state(snapshot, Schedule.from_config(config))
        ended = [] if has_launcher(folder.path) or not config.network.shared_folder else ending(folder.path)
        pages, apis = read_endpoints(folder.path, "gateway"), read_endpoints(folder.path, "agents")
        if as_json:
            data = {"view": asdict(view), "counts": asdict(counts), "generators": [asdict(g) for g in generators]}
            data |= {
                "failure": failure,
                "state": state,
                "waiting_for": waiting_for,
                "waits": waits,
                "ending": dict(ended),
            }
            data["gateways"] = [page.url for page in pages]
            data["agents"] = [api.url for api in apis]
            typer.echo(json.dumps(data, default=str))
            return
        table = Table("field", "value", title=f"run {config.name}")
        distant = distant_launcher(folder.path)
        if distant:
            table.add_row("launcher", f"{distant}, which cannot be seen from this machine")
        now = [] if ended else [("state", state), ("waits for", waiting_for)]
        for name, value in [*([("failed", failure)] if failure else now), *ended]:
            table.add_row(name, escape(value))
        for name, wait in waits.items():
            table.add_row(f"{name} waits", escape(wait))
        _add_queue(table, config, view, counts)
        for api in apis:
            table.add_row("OpenAI-compatible API", api.url)
        if pages or apis:
            table.add_row("token", known_token(config) or "the value of ROLLMESH_GATEWAY__TOKEN")
        output_console().print(table)
        for page in pages:  # below the table, whose columns would cut the link
            output_console().print(_way_to(page, config), markup=False, highlight=False, soft_wrap=True)
        if generators or not ended:
            _print_generators(generators)

    run_async(main)


def _way_to(page: Endpoint, config: RunConfig) -> str:
    """Return the line with the address of the page; in a pod also the command by which a browser reaches it."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return f"the run as a page: {page_link(config, page.url)}"
    url = urlsplit(page.url)
    link = page_link(config, url._replace(netloc=f"127.0.0.1:{url.port}").geturl())
    namespace = os.environ.get("POD_NAMESPACE", "default")
    forward = f"kubectl port-forward --namespace={namespace} pod/{page.pod} {url.port}:{url.port}"
    return f"the run as a page: {forward}, then {link}"


async def _distant_waits(config: RunConfig, store: TrajectoryStore) -> Mapping[str, str]:
    """Return what a trainer waits for that shares no run folder with this process."""
    text = "" if config.network.shared_folder else await store.training.waits()
    return {"trainer": text} if text else {}


async def _service_waits(run: Path) -> Mapping[str, str]:
    """Return what each service of the run on this machine waits for, with the last error."""
    config, folder = run_of(run)
    async with AdminClient(PortSecurity.from_config(config.security)) as client:
        states = ServiceStates(folder.path, client)
        await states.read()
    return states.waits


def _add_queue(table: Table, config: RunConfig, view: MeshView, counts: StoreCounts) -> None:
    table.add_row("train step", f"{view.trained_step} of {config.trainer.train_steps}")
    table.add_row("policy version", f"{view.policy_version}")
    resting = f", {view.resting} resting" if view.resting else ""
    table.add_row("trajectories", f"{view.leased} leased, {view.partial} partial{resting}, {view.pending} pending")
    aside = f", {view.aside_groups} aside" if view.aside_groups else ""
    table.add_row("groups", f"{view.open_groups} open, {view.ready_groups} ready{aside}")
    table.add_row("queue memory", f"{view.memory_ratio:.1%} of maxmemory")
    for reason, number in sorted(counts.drops.items()):
        table.add_row(f"dropped: {reason}", str(number))
    for reason, total in WASTE_TOTALS.items():
        if counts.totals.get(total):
            tokens = counts.dropped_tokens.get(reason, 0)
            table.add_row(f"wasted: {reason}", f"{counts.totals[total]} with {tokens} tokens")


def _print_generators(generators: Sequence[GeneratorRecord]) -> None:
    serving = Table("generator", "version", "running", "waiting", "slots", "state")
    for g in generators:
        state = "serving" if g.serving else g.reason
        if g.refused_version is not None:
            state += f"; refuses version {g.refused_version}: {g.refused_reason}"
        row = (g.address, g.policy_version, g.running_count, g.waiting_count, g.slot_count, state)
        serving.add_row(*map(str, row))
    output_console().print(serving)


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
    from rollmesh.launcher.beside_evaluation import evaluate_beside, source_of
    from rollmesh.launcher.evaluations import evaluate_run

    async def main() -> None:
        config, folder = run_of(run)
        shutdown, console = shutdown_event(), progress_console(as_json)
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
    score = f"{result.mean:.4f} {plus_minus(result.standard_error, '.4f')} (n={result.n}){result.shortage}"
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
    """Print the place and the history of a trajectory, or of the members of a group."""
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
    from rollmesh.launcher.closing import queue_account
    from rollmesh.report.audit import audit_run, print_audit

    console = progress_console(as_json)

    async def read_account() -> tuple[Path, QueueAccount | None]:
        _, folder = run_of(run)
        try:
            async with store_of(run) as (_, _, store):
                return folder.path, await queue_account(store)
        except StoreUnavailable as error:
            console.print(f"lost groups are not checked: {error}", markup=False, highlight=False, soft_wrap=True)
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
    """Regenerate the plots and the HTML report of a run folder.

    Example: `rollmesh report runs/demo`
    """
    from rollmesh.report.html import write_report

    with clear_errors():
        _, folder = run_of(run)
        typer.echo(write_report(folder.path))


def pin(
    run: RunFolderArgument,
    version: VersionOption = None,
    release: Annotated[
        bool, typer.Option("--release", help="Release the pin: serve the newest version again.")
    ] = False,
) -> None:
    """Pin generators to one policy version, or release the pin.

    Example: `rollmesh pin runs/demo --version 10`
    """

    async def main() -> None:
        if release and version is not None:
            raise ConfigError(f"--version {version} with --release: give one of them")
        async with store_of(run) as (_, _, store):
            chosen = None if release else version
            if not release and version is None:
                latest = await store.policies.latest()
                if latest is None:
                    raise ConfigError("the run has published no policy yet; pin one once the trainer has started")
                chosen = latest.policy_version
            await store.policies.pin(chosen)
        typer.echo(
            "released"
            if chosen is None
            else f"pinned to policy version {chosen}; rollmesh pin {run} --release serves the newest one again"
        )

    run_async(main)


def rollback(
    run: RunFolderArgument,
    version: Annotated[int, typer.Option("--version", help="Announced policy version to restore.", min=0)],
) -> None:
    """Roll back to an older policy: publish its weights again as the next version and continue training from it.

    The trainer performs the rollback between two train steps or, if it has ended, at the next start of the run, also of
    a finished run. The optimizer state is reset, groups of the abandoned branch are dropped with the reason
    rolled_back, and trained groups stay in the ledger. Afterwards no rollout starts on an older version: a pin on one
    blocks all new work until it is released.

    Example: `rollmesh rollback runs/demo --version 10`
    """

    async def main() -> None:
        async with store_of(run) as (_, _, store):
            request = await store.rollbacks.request(version)
        typer.echo(
            f"rollback to policy version {version} requested ({request.request_id}): the trainer performs it before "
            "its next step, or at its next start if it has ended"
        )

    run_async(main)
