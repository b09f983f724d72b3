"""``sync`` beside ``copris_paper`` on one shared device, and the step-time curve of decode.

A random model of Qwen2.5-0.5B's shape in bfloat16; 32 groups of 8 trajectories per update. Engine and train step are
those of a mesh, and weights move through a checkpoint folder. There is no Redis, reward service or gRPC. The arms take
turns, update by update. A rate counts the smaller of trained and generated tokens, so that unfinished work and work
from the warm-up do not count.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from benchmarks.decode_steps import measure_points, measure_prefill, step_measure
from benchmarks.frame import Measure, Quick, compared
from benchmarks.gpu_arm import BenchArm, Update, Workload
from benchmarks.models import write_random_model
from rollmesh.config.generator import GeneratorConfig
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.errors import ConfigError
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.sim.decode_curve import CurvePoint, write_curve
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Int32Array

Curves = dict[str, tuple[CurvePoint, ...]]
"""Points of the decode curve by the engine's way to run steps."""

RESULTS = "results.json"
_SECONDS = 540.0
"""No turn starts that would probably end later than this."""
_QWEN_05B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "max_position_embeddings": 32_768,
}
_TINY: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of one experiment; the defaults are those of docs/gpu.md."""

    shape: dict[str, Any]
    workload: Workload
    device: Literal["cpu", "cuda"] = "cuda"
    dtype: str = "bfloat16"
    pools: tuple[int, ...] = (512,)
    updates: int = 3
    """Measured updates of every arm."""
    warmup: int = 2
    """Updates of copris_paper before the measured ones, while its pool fills; sync makes at most one."""
    curve_contexts: tuple[int, ...] = (640, 2560)
    """Context tokens before the tokens of the step-time curve; ``generator.pace`` gets the steps at the first."""


def full_plan() -> Plan:
    """Return the plan of docs/gpu.md."""
    sizes = {"prompt_tokens": 128, "median_length": 500, "longest": 4096, "groups_per_batch": 32, "group_size": 8}
    return Plan(shape=_QWEN_05B, workload=Workload(vocab_size=_QWEN_05B["vocab_size"], **sizes))


def quick_plan() -> Plan:
    """Return a plan of seconds on a CPU: it shows that the bench runs, its figures mean nothing."""
    sizes = {"prompt_tokens": 8, "median_length": 20, "longest": 120, "groups_per_batch": 4, "group_size": 4}
    workload = Workload(vocab_size=_TINY["vocab_size"], **sizes)
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    return Plan(shape=_TINY, workload=workload, device=device, dtype="float32", pools=(32,), curve_contexts=(8, 16))


def run(
    *,
    quick: Quick = False,
    pool: Annotated[list[int] | None, typer.Option(help="pool_size of a copris_paper arm; repeatable.")] = None,
    updates: Annotated[int | None, typer.Option(help="Measured updates per arm.", min=1)] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the JSON results; default: bench-gpu.")] = None,
) -> list[Measure]:
    """Measure; ``pool`` and ``updates`` replace those of the plan. ConfigError without a GPU, unless ``quick``."""
    if not quick and not torch.cuda.is_available():
        raise ConfigError(
            "bench gpu: this machine or this build of torch has no CUDA, and on a CPU the figures would mean nothing; "
            "--quick runs a tiny model to show that it works"
        )
    plan = quick_plan() if quick else full_plan()
    plan = replace(plan, pools=tuple(pool or plan.pools), updates=updates or plan.updates)
    return asyncio.run(_measure(plan, output if output is not None or quick else Path("bench-gpu")))


async def _measure(plan: Plan, output: Path | None) -> list[Measure]:
    """Run a plan; rewrite ``results.json`` after every update, so that an interrupted run leaves figures."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as scratch:
        root = Path(scratch)
        write_random_model(root / "model", plan.shape)
        async with _engine(plan, root, cuda_graphs=False) as engine:
            curves: Curves = {"without graphs": await _points(plan, engine)}
        async with _engine(plan, root, cuda_graphs=True) as engine:
            curves["with graphs" if plan.device == "cuda" else "padded steps"] = await _points(plan, engine)
            prefill = await measure_prefill(engine, _prompt(plan), plan.curve_contexts[-1])
            arms = [BenchArm(pool, plan.workload, engine, _trainer(plan, root), root) for pool in (None, *plan.pools)]
            updates: list[Update] = []
            _save(output, plan, curves, updates, prefill)
            turn_seconds = 0.0
            for turn in range(plan.warmup + plan.updates):
                turn_started = time.perf_counter()
                if updates and turn_started - started + turn_seconds > _SECONDS:
                    break
                # sync starts empty and needs one update to warm up.
                for arm in arms if turn >= plan.warmup - 1 else arms[1:]:
                    update = await arm.update()
                    if turn >= plan.warmup:
                        updates.append(update)
                        _save(output, plan, curves, updates, prefill)
                turn_seconds = time.perf_counter() - turn_started
            return measures(plan, curves, updates)


@asynccontextmanager
async def _engine(plan: Plan, root: Path, *, cuda_graphs: bool) -> AsyncIterator[TorchEngine]:
    workload = plan.workload
    config = GeneratorConfig(
        slots=max(*plan.pools, workload.batch_size),
        max_context_tokens=workload.prompt_tokens + workload.longest,
        device=plan.device,
        cuda_graphs=cuda_graphs,
    )
    engine = TorchEngine(config, plan.dtype, several_turns=False)
    await engine.start(root / "model", 0)
    try:
        yield engine
    finally:
        await engine.aclose()


def _trainer(plan: Plan, root: Path) -> PolicyTrainer:
    config = TrainerConfig(tokens_per_microbatch=8192, algorithm=AlgorithmConfig(old_logprobs="stage_end"))
    return PolicyTrainer(root / "model", config, dtype=plan.dtype, device=plan.device)


def _prompt(plan: Plan) -> Int32Array:
    return plan.workload.group(0)[0].prompt.token_ids


async def _points(plan: Plan, engine: TorchEngine) -> tuple[CurvePoint, ...]:
    """Measure decode steps for some numbers of calls in progress, up to all slots, at every context."""
    slots = engine.status().slot_count
    counts = (*(count for count in (1, 8, 64, 256) if count < slots), slots)
    return await measure_points(engine, _prompt(plan), counts, plan.curve_contexts, rounds=2)


def measures(plan: Plan, curves: Curves, updates: Sequence[Update]) -> list[Measure]:
    """Return the rows of the table: every arm with sync as the baseline, then the curves."""
    rows: list[Measure] = []
    figures = {name: _figures([u for u in updates if u.arm == name]) for name in dict.fromkeys(u.arm for u in updates)}
    for name, values in figures.items():
        for (figure, unit), value in values.items():
            row = compared(f"{name}: {figure}", value, unit, "sync", figures["sync"][figure, unit])
            rows.append(row if name != "sync" else Measure(name=row.name, value=value, unit=unit))
    rows += [step_measure(point, mode) for mode, points in curves.items() for point in points]
    return [replace(row, name=f"{row.name}, {_device(plan)}") for row in rows]


def _figures(updates: Sequence[Update]) -> dict[tuple[str, str], float]:
    count = len(updates)
    seconds = {phase: sum(u.seconds[phase] for u in updates) for phase in updates[0].seconds}
    generated, trained = sum(u.generated_tokens for u in updates), sum(u.trained_tokens for u in updates)
    return {
        ("time per update", "s"): sum(seconds.values()) / count,
        ("of it generation", "s"): seconds["generate"] / count,
        ("of it training", "s"): seconds["train"] / count,
        ("trained tokens (charged)", "tokens/s"): min(trained, generated) / sum(seconds.values()),
        ("mean response trained on", "tokens"): trained / sum(len(u.lengths) for u in updates),
        ("prefilled again per update", "tokens"): sum(u.reprefilled_tokens for u in updates) / count,
        ("most calls in progress", "calls"): max(u.most_running for u in updates),
    }


def _device(plan: Plan) -> str:
    return torch.cuda.get_device_name(plan.device) if plan.device == "cuda" else "CPU"


def _pace(points: Sequence[CurvePoint]) -> list[tuple[int, float]]:
    """Return the steps at the shortest context, in the form of ``generator.pace``."""
    shortest = min(point.context for point in points)
    return [(point.running, point.seconds) for point in points if point.context == shortest]


def _save(output: Path | None, plan: Plan, curves: Curves, updates: Sequence[Update], prefill: float) -> None:
    """Write the results, and a decode curve per mode in the form that ``rollmesh sim`` reads."""
    if output is None:
        return
    output.mkdir(parents=True, exist_ok=True)
    for mode, points in curves.items():
        engine = f"torch engine {mode}, {_device(plan)}"
        write_curve(output / f"decode-{mode.replace(' ', '-')}.json", points, prefill, engine)
    document = {
        "device": _device(plan),
        "torch": torch.__version__,
        "plan": asdict(plan),
        "curves": {mode: _pace(points) for mode, points in curves.items()},
        "updates": [asdict(update) for update in updates],
        "measures": [measure.figures() for measure in measures(plan, curves, updates)],
    }
    (output / RESULTS).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
