"""``rollmesh bench gpu``: ``sync`` and ``copris_paper`` on one shared GPU, and the step-time curve of decode.

A randomly initialised model of Qwen2.5-0.5B's shape in bfloat16, 32 groups of 8 trajectories per update. Response
lengths are fixed per (prompt, index), lognormal with median 500 and cap 4096, the same in every arm. Scheduling core,
engine and train step are those of a mesh; weights move from trainer to engine through a checkpoint folder. The arms
alternate, update by update, on one engine that is idle in between; warm-up updates do not count.

Differences from a mesh, the same in every arm: there is no Redis queue, reward service or gRPC (the queue is in this
process's memory, rewards are fixed by key). The rate of an arm counts the smaller of its trained tokens and its
generated tokens in the measured updates, so neither unfinished work nor work from the warm-up counts. Old
log-probabilities are the paper's, so copris_paper pays for scoring its partial trajectories.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rollmesh.bench.gpu_arm import BenchArm, Update, make_trainer
from rollmesh.bench.gpu_curve import Curve, running_counts, step_time_curve
from rollmesh.bench.gpu_workload import QWEN2_5_05B, TINY, Shape, Workload, write_random_model
from rollmesh.bench.measure import Measure, compared
from rollmesh.config.schedule import ScheduleConfig
from rollmesh.errors import ConfigError
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.generator.engines.torch.torch_options import TorchEngineOptions
from rollmesh.scheduling import Schedule, resolve_schedule

RESULTS, CURVE = "results.json", "step_time_curve.json"
SYNC = "sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of one experiment."""

    shape: Shape
    dtype: str
    device: str
    workload: Workload
    groups_per_batch: int
    group_size: int
    pools: tuple[int, ...]
    updates: int
    """Measured updates of every arm."""
    warmup: int
    """Updates of copris_paper before the measured ones, while its pool fills; sync starts empty and makes one."""
    token_budget: int
    """Tokens of one training pass."""
    cuda_graphs: bool
    curve_context: int
    """Context tokens before the tokens of the step-time curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFindings:
    """Measured updates and step-time curve; either may be empty."""

    parameters: int
    updates: tuple[Update, ...]
    curve: Curve


def full_plan() -> Plan:
    """Return the plan of the experiment in docs/gpu.md."""
    workload = Workload(
        vocab_size=QWEN2_5_05B.vocab_size, prompt_tokens=128, median_length=500, sigma=1.0, longest=4096
    )
    return Plan(
        shape=QWEN2_5_05B,
        dtype="bfloat16",
        device="cuda",
        workload=workload,
        groups_per_batch=32,
        group_size=8,
        pools=(256, 512, 768),
        updates=6,
        warmup=3,
        token_budget=8192,
        cuda_graphs=True,
        curve_context=640,
    )


def quick_plan() -> Plan:
    """Return a plan that takes seconds on a CPU; it tests that the bench runs, not its speed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workload = Workload(vocab_size=TINY.vocab_size, prompt_tokens=8, median_length=20, sigma=1.0, longest=120)
    return Plan(
        shape=TINY,
        dtype="float32",
        device=device,
        workload=workload,
        groups_per_batch=4,
        group_size=4,
        pools=(16, 32),
        updates=2,
        warmup=2,
        token_budget=512,
        cuda_graphs=device == "cuda",
        curve_context=16,
    )


def run(
    *,
    quick: bool = False,
    curve_only: bool = False,
    pools: Sequence[int] = (),
    updates: int | None = None,
    cuda_graphs: bool | None = None,
    output: Path | None = None,
) -> list[Measure]:
    """Measure; arguments that are set replace those of the plan.

    Files are written to ``output`` (default ``bench-gpu``, or no files with ``quick``). Raises ConfigError without a
    GPU, unless ``quick``.
    """
    if not quick and not torch.cuda.is_available():
        raise ConfigError(
            "bench gpu: this machine or this build of torch has no CUDA, and on a CPU the figures would mean nothing; "
            "--quick runs a tiny model to show that it works"
        )
    plan = quick_plan() if quick else full_plan()
    changes: dict[str, Any] = {"pools": tuple(pools) or None, "updates": updates, "cuda_graphs": cuda_graphs}
    plan = replace(plan, **{name: value for name, value in changes.items() if value is not None})
    folder = output if output is not None or quick else Path("bench-gpu")
    threads = torch.get_num_threads()
    if plan.device == "cpu":
        torch.set_num_threads(1)
    try:
        findings = asyncio.run(measure(plan, folder, curve_only=curve_only))
    finally:
        torch.set_num_threads(threads)
    return measures(plan, findings)


async def measure(plan: Plan, output: Path | None, *, curve_only: bool = False) -> GpuFindings:
    """Run a plan; rewrite the files after every update, so that an interrupted run leaves figures."""
    options = TorchEngineOptions(
        slots=max(*plan.pools, plan.groups_per_batch * plan.group_size),
        max_context_tokens=plan.workload.context_tokens,
        device=plan.device,
        dtype=plan.dtype,
        cuda_graphs=plan.cuda_graphs,
    )
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as scratch:
        model = Path(scratch) / "initial"
        parameters = write_random_model(model, plan.shape, plan.dtype)
        engine = TorchEngine(options)
        await engine.start(model, 0)
        try:
            context = plan.workload.prompt(0).token_ids.repeat(plan.curve_context)[: plan.curve_context]
            curve = await step_time_curve(engine, running_counts(options.slots), context)
            findings = GpuFindings(parameters=parameters, updates=(), curve=curve)
            _save(output, plan, findings)
            if curve_only:
                return findings
            arms = [_arm(plan, schedule, engine, model, Path(scratch)) for schedule in schedules(plan)]
            async for update in _turns(plan, arms):
                findings = GpuFindings(parameters=parameters, updates=(*findings.updates, update), curve=curve)
                _save(output, plan, findings)
            return findings
        finally:
            await engine.aclose()


def schedules(plan: Plan) -> list[Schedule]:
    """Return the schedules of the arms: sync, and copris_paper at every pool size."""
    # The scheduler reduces the work towards its last step, which must come after the measured steps.
    pool_batches = -(-max(plan.pools) // (plan.groups_per_batch * plan.group_size))
    steps = plan.warmup + plan.updates + pool_batches + 1
    sizes = {"groups_per_batch": plan.groups_per_batch, "group_size": plan.group_size}
    sync = ScheduleConfig.model_validate({"preset": SYNC, **sizes})
    # The paper has no staleness bound; ours must not slow the measured updates.
    unbounded = {"preset": "copris_paper", "max_staleness": steps, **sizes}
    copris = [ScheduleConfig.model_validate({"pool_size": pool, **unbounded}) for pool in plan.pools]
    return [resolve_schedule(config, steps) for config in (sync, *copris)]


async def _turns(plan: Plan, arms: Sequence[BenchArm]) -> AsyncIterator[Update]:
    """Run one update of every arm in turn; yield the measured updates."""
    for turn in range(plan.warmup + plan.updates):
        for arm in arms:
            if arm.name == SYNC and turn < plan.warmup - 1:
                continue
            update = await arm.update()
            if turn >= plan.warmup:
                yield update


def _arm(plan: Plan, schedule: Schedule, engine: TorchEngine, model: Path, scratch: Path) -> BenchArm:
    name = SYNC if schedule.preset == SYNC else f"{schedule.preset} {schedule.pool_size}"
    trainer = make_trainer(model, dtype=plan.dtype, device=plan.device, token_budget=plan.token_budget)
    return BenchArm(name, schedule, plan.workload, engine, trainer, scratch / name)


def measures(plan: Plan, findings: GpuFindings) -> list[Measure]:
    """Return the rows of the table: every arm with sync as the baseline, then the curve."""
    label = f"{plan.shape.name} shape on {device_name(plan.device)}, {plan.dtype}"
    rows = [Measure(name=label, value=findings.parameters / 1e6, unit="million parameters")]
    by_arm: dict[str, list[Update]] = {}
    for update in findings.updates:
        by_arm.setdefault(update.arm, []).append(update)
    base = by_arm.get(SYNC, [])
    for name, updates in by_arm.items():
        for figure, value, baseline, unit in zip(_FIGURES, _values(updates), _values(base), _UNITS, strict=True):
            title = f"{name}: {figure}"
            if name == SYNC:
                rows.append(Measure(name=title, value=value, unit=unit))
            else:
                rows.append(compared(title, value, unit, SYNC, baseline))
    graphs = "CUDA graphs" if plan.cuda_graphs and plan.device == "cuda" else "no graphs"
    for running, seconds in findings.curve:
        rows.append(Measure(name=f"decode step, {running} running, {graphs}", value=1000 * seconds, unit="ms"))
    return rows


_FIGURES = (
    "time per update",
    "of it generation",
    "of it training",
    "trained tokens, charged for what is unfinished",
    "generated tokens",
    "mean response trained on",
    "response tokens prefilled again per update",
    "tokens in flight at the end of the last update",
    "most trajectories running",
)
_UNITS = ("s", "s", "s", "tokens/s", "tokens/s", "tokens", "tokens", "tokens", "trajectories")


def _values(updates: Sequence[Update]) -> tuple[float, ...]:
    """Return one number for each of ``_FIGURES``."""
    if not updates:
        return (0.0,) * len(_FIGURES)
    count, seconds = len(updates), sum(u.total_seconds for u in updates)
    trained, generated = charged_tokens(updates), sum(u.generated_tokens for u in updates)
    return (
        seconds / count,
        sum(u.seconds["generate"] for u in updates) / count,
        sum(u.seconds["train"] + u.seconds["stage_end"] for u in updates) / count,
        trained / seconds,
        generated / seconds,
        sum(u.trained_tokens for u in updates) / sum(len(u.lengths) for u in updates),
        sum(u.reprefilled_tokens for u in updates) / count,
        updates[-1].untrained_tokens,
        max(u.most_running for u in updates),
    )


def charged_tokens(updates: Sequence[Update]) -> int:
    """Return the smaller of the trained tokens and the generated tokens of these updates."""
    return min(sum(u.trained_tokens for u in updates), sum(u.generated_tokens for u in updates))


def device_name(device: str) -> str:
    """Return the name of the device for the figures."""
    return torch.cuda.get_device_name(device) if device == "cuda" else "CPU"


def _save(output: Path | None, plan: Plan, findings: GpuFindings) -> None:
    if output is None:
        return
    output.mkdir(parents=True, exist_ok=True)
    document = {
        "device": device_name(plan.device),
        "torch": torch.__version__,
        "plan": asdict(plan),
        "findings": asdict(findings),
        "measures": [m.figures() for m in measures(plan, findings)],
    }
    (output / RESULTS).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (output / CURVE).write_text(json.dumps(findings.curve) + "\n", encoding="utf-8")
