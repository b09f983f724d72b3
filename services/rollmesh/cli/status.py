"""``rollmesh status``: the state of a run, its queue, and what its services wait for."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

import typer
from rich.markup import escape
from rich.table import Table

from rollmesh.checkpoints.sealing import known_token, page_link
from rollmesh.cli.common import JsonOption, RunFolderArgument, run_async, run_of, store_of
from rollmesh.config import RunConfig
from rollmesh.config.teachers import teacher_service
from rollmesh.errors import StoreUnavailable
from rollmesh.mesh import MeshView
from rollmesh.report.console import output_console, print_line
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.sentences import ending
from rollmesh.runtime.endpoints import AdminClient, Endpoint, ServiceStates, read_endpoints
from rollmesh.runtime.locks import distant_launcher, has_launcher
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.scheduling import Schedule
from rollmesh.store import TrajectoryStore
from rollmesh.store.queue_types import WASTE_TOTALS, StoreCounts
from rollmesh.types import GeneratorRecord

_PATIENCE_SECONDS = 3.0
"""Time until ``status`` reports that Redis does not answer."""


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
        recorded = RecordedRun(folder.path)
        failure = snapshot.failure or recorded.failure
        state, waiting_for = run_state(snapshot, Schedule.from_config(config))
        ended = [] if has_launcher(folder.path) or not config.network.shared_folder else ending(recorded)
        pages, apis = read_endpoints(folder.path, "gateway"), read_endpoints(folder.path, "agents")
        if as_json:
            data = {"view": asdict(view), "counts": asdict(counts), "generators": [asdict(g) for g in generators]}
            data |= {"failure": failure, "state": state, "waiting_for": waiting_for}
            data |= {"waits": waits, "ending": dict(ended)}
            data["gateways"] = [page.url for page in pages]
            data["agents"] = [api.url for api in apis]
            data["teachers"] = _teachers(config, folder.path)
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
        _add_queue(table, config, view, counts, folder.path)
        for api in apis:
            table.add_row("OpenAI-compatible API", api.url)
        if pages or apis:
            table.add_row("token", known_token(config) or "the value of ROLLMESH_GATEWAY__TOKEN")
        output_console().print(table)
        for page in pages:  # below the table, whose columns would cut the link
            print_line(output_console(), _way_to(page, config))
        if generators or not ended:
            _print_generators(generators)

    run_async(main)


def _teachers(config: RunConfig, folder: Path) -> dict[str, str]:
    """Return the model and the services of each teacher by name."""
    found = {}
    for name, teacher in config.teachers.items():
        running = len(read_endpoints(folder, teacher_service(name)))
        services = teacher.address or f"{running} running"
        found[name] = f"{teacher.model or 'model of its services'}, {services}"
    return found


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
    config, folder = run_of(run)
    async with AdminClient(PortSecurity.from_config(config.security)) as client:
        states = ServiceStates(folder.path, client)
        await states.read()
    return states.waits


def _add_queue(table: Table, config: RunConfig, view: MeshView, counts: StoreCounts, folder: Path) -> None:
    table.add_row("train step", f"{view.trained_step} of {config.trainer.train_steps}")
    table.add_row("policy version", f"{view.policy_version}")
    resting = f", {view.resting} resting" if view.resting else ""
    table.add_row("trajectories", f"{view.leased} leased, {view.partial} partial{resting}, {view.pending} pending")
    aside = f", {view.aside_groups} aside" if view.aside_groups else ""
    table.add_row("groups", f"{view.open_groups} open, {view.ready_groups} ready{aside}")
    table.add_row("queue memory", f"{view.memory_ratio:.1%} of maxmemory")
    for name, teacher in _teachers(config, folder).items():
        table.add_row(f"teacher {name}", escape(teacher))
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
