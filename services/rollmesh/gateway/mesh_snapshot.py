"""Snapshot of the mesh, and the overview built from it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rollmesh.gateway.curves import Curves
from rollmesh.gateway.models.live import (
    DomainView,
    DropView,
    EvaluationView,
    GeneratorView,
    MemoryView,
    Overview,
    PausedBy,
    Rates,
    RunState,
    ServiceScale,
    Staleness,
    StalenessBin,
    WasteView,
)
from rollmesh.mesh import Desired, MeshView, WaitReason
from rollmesh.prompt_history import DomainTotals
from rollmesh.scheduling import Schedule
from rollmesh.store import TrajectoryStore
from rollmesh.store.policy_registry import HeldPin
from rollmesh.store.queue_types import WASTE_TOTALS, EvalRecord, StoreCounts
from rollmesh.types import GeneratorRecord

MOST_GENERATORS = 256
MOST_EVALUATIONS = 64
MOST_DOMAINS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSnapshot:
    """State of the store at one moment."""

    view: MeshView
    counts: StoreCounts
    desired: Desired
    generators: Sequence[GeneratorRecord]
    pin: HeldPin | None
    rollback_to: int | None
    failure: str
    scale_requests: Mapping[str, int]
    workers: Mapping[str, str]
    """Worker name by session."""
    domains: Mapping[str, DomainTotals]
    """Totals by domain of the prompts."""


async def read_snapshot(store: TrajectoryStore, *, groups: bool = False) -> MeshSnapshot:
    """Read all state except single trajectories; with ``groups`` the view lists the groups."""
    rollback = await store.rollbacks.pending()
    return MeshSnapshot(
        view=await store.mesh.view(groups=groups),
        counts=await store.mesh.counts(),
        desired=await store.leadership.desired(),
        generators=await store.generators.live(),
        pin=await store.policies.held_pin(),
        rollback_to=None if rollback is None else rollback.policy_version,
        failure=await store.leadership.failure(),
        scale_requests=await store.scaling.requests(),
        workers=await store.inspection.workers(),
        domains=await store.prompt_records.domain_totals(),
    )


def finished_evaluations(records: Sequence[EvalRecord]) -> list[EvaluationView]:
    """Return the scores of finished evaluations by version; only the newest evaluation of a version counts."""
    found: dict[int, EvaluationView] = {}
    for record in records:
        if record.result is not None and record.result.sample_count > 0:  # an abandoned evaluation has no score
            found[record.request.policy_version] = EvaluationView(
                policy_version=record.request.policy_version,
                mean=record.result.mean,
                standard_error=record.result.standard_error,
                sample_count=record.result.sample_count,
                time=record.finish_time_seconds,
            )
    return [found[version] for version in sorted(found)]


def generator_views(records: Sequence[GeneratorRecord], newest_version: int) -> list[GeneratorView]:
    """Return the views of generators, serving ones first."""
    ordered = sorted(records, key=lambda r: (not r.serving, r.address, r.instance_id))
    return [
        GeneratorView(
            instance_id=r.instance_id,
            address=r.address,
            policy_version=r.policy_version,
            versions_behind=max(0, newest_version - r.policy_version) if r.policy_version >= 0 else 0,
            serving=r.serving,
            reason=r.reason,
            running=r.running_count,
            waiting=r.waiting_count,
            slots=r.slot_count,
            kv_token_capacity=r.kv_token_capacity,
            kv_tokens_used=r.kv_tokens_used,
            preemptions=r.preemption_total,
        )
        for r in ordered
    ]


def _domain_views(totals: Mapping[str, DomainTotals]) -> tuple[DomainView, ...]:
    largest = sorted(totals.items(), key=lambda item: (-item[1].drawn, item[0]))[:MOST_DOMAINS]
    return tuple(DomainView(domain=name, **asdict(found)) for name, found in largest)


def build_overview(
    snapshot: MeshSnapshot,
    *,
    run: str,
    schedule: Schedule,
    rates: Rates,
    curves: Curves,
    evaluations: Sequence[EvaluationView],
    running: Mapping[str, int],
    begin_time: float | None = None,
    waits: str = "",
) -> Overview:
    """Return the overview of one snapshot; ``running`` are local processes by service.

    ``begin_time`` is the time of the first record of the run; ``waits`` is what the services wait for.
    """
    view, counts = snapshot.view, snapshot.counts
    state, waiting_for = run_state(snapshot, schedule)
    if waits and state != "failed":
        waiting_for = f"{waiting_for}; {waits}" if waiting_for else waits
    return Overview(
        run=run,
        time=view.now,
        state=state,
        waiting_for=waiting_for,
        paused_by_person=view.user_paused,
        paused_by=_paused_by(view, state),
        train_step=view.trained_step,
        train_steps=schedule.train_steps,
        cut_step=view.cut_step,
        newest_version=view.policy_version,
        newest_train_step=view.policy_train_step,
        pinned_version=None if snapshot.pin is None else snapshot.pin.policy_version,
        pinned_by=None if snapshot.pin is None else "evaluation" if snapshot.pin.owner else "operator",
        rollback_to=snapshot.rollback_to,
        pool_size=snapshot.desired.pool_size + view.beyond_pool,
        trajectories=dict(counts.trajectories),
        groups=dict(counts.groups),
        staleness=_staleness(view, schedule, curves),
        drops=drop_views(counts.drops, counts.dropped_tokens),
        waste=waste_views(counts.totals, counts.dropped_tokens),
        domains=_domain_views(snapshot.domains),
        domain_count=len(snapshot.domains),
        generators=generator_views(snapshot.generators, view.policy_version)[:MOST_GENERATORS],
        generator_count=len(snapshot.generators),
        evaluations=list(evaluations[-MOST_EVALUATIONS:]),
        memory=MemoryView(
            used_bytes=counts.used_memory_bytes, max_bytes=counts.max_memory_bytes, ratio=view.memory_ratio
        ),
        rates=rates,
        report=curves.report,
        totals=dict(counts.totals),
        workers=len(snapshot.workers),
        dead_letters=counts.dead_letters,
        services=_service_scales(running, snapshot.scale_requests),
        elapsed_seconds=None if begin_time is None else max(0.0, view.now - begin_time),
        remaining_seconds=curves.pace.remaining(view.trained_step, schedule.train_steps, view.now),
    )


def _service_scales(running: Mapping[str, int], requested: Mapping[str, int]) -> list[ServiceScale]:
    names = sorted(running.keys() | requested.keys())
    return [ServiceScale(service=name, running=running.get(name, 0), requested=requested.get(name)) for name in names]


def drop_views(dropped: Mapping[str, int], tokens: Mapping[str, int]) -> list[DropView]:
    """Return the groups that left untrained, from the groups and the tokens by reason."""
    return [
        DropView(reason=reason, groups=groups, tokens=tokens.get(reason, 0))
        for reason, groups in sorted(dropped.items())
        if groups
    ]


def waste_views(totals: Mapping[str, int], tokens: Mapping[str, int]) -> tuple[WasteView, ...]:
    """Return the tokens that were wasted in groups that stayed, from the queue's totals and the tokens by reason."""
    return tuple(
        WasteView(reason=reason, count=totals[total], tokens=tokens.get(reason, 0))
        for reason, total in WASTE_TOTALS.items()
        if totals.get(total)
    )


def _staleness(view: MeshView, schedule: Schedule, curves: Curves) -> Staleness:
    waiting = [(max(0, view.cut_step - step), count) for step, count in reversed(view.unclaimed_by_step)]
    queue = [StalenessBin(staleness=staleness, count=count) for staleness, count in waiting]
    return Staleness(bound=schedule.max_staleness, queue=queue, trained=curves.trained_staleness)


def run_state(snapshot: MeshSnapshot, schedule: Schedule) -> tuple[RunState, str]:
    """Return the state of the run and the condition it waits for."""
    view = snapshot.view
    if snapshot.failure:
        return "failed", snapshot.failure
    if view.is_complete and view.policy_train_step >= schedule.train_steps:
        return "complete", ""
    if view.recovering:
        return "recovering", view.rests_until
    if view.policy_version < 0:
        return "starting", WaitReason.INITIAL_POLICY.format()
    desired = snapshot.desired
    if view.rests_until or desired.paused:
        # The leader writes its reason with a delay; a pause by the operator or the launcher takes effect immediately.
        return "paused", view.rests_until or desired.reason or desired.waiting_for
    if not any(generator.serving for generator in snapshot.generators):
        return "running", WaitReason.GENERATOR.format()
    if not desired.pool_size:
        return "running", WaitReason.LEADER.format()
    return "running", desired.waiting_for


def _paused_by(view: MeshView, state: RunState) -> tuple[PausedBy, ...]:
    switches: dict[PausedBy, bool] = {"operator": view.user_paused, "launcher": view.launcher_paused}
    on = tuple(by for by, is_on in switches.items() if is_on)
    return on or (("schedule",) if state == "paused" else ())
