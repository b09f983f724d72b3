"""A run folder with plausible numbers: what the mesh writes, made by arithmetic instead of hours of training."""

import json
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

import numpy as np

from rollmesh.config.load import validate_run_config, write_run_config
from rollmesh.trainer.learner.step_report import BatchStats, GapStats, PolicyStats, RatioStats, SpreadStats, StepReport
from rollmesh.trainer.service.training_loop import step_record

START = 1_800_000_000.0
T = TypeVar("T")


def write_lines(file: Path, records: list[dict[str, Any]]) -> None:
    """JSON lines."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def filled(kind: type[T], **known: Any) -> T:
    """A record with these fields, whose others are zero, empty or None."""
    values: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        whole = get_origin(hint) or hint
        if is_dataclass(hint):
            values[name] = None if name in known else filled(hint)
        else:
            values[name] = {} if whole is Mapping else whole() if whole in (int, float, bool, tuple, str) else None
    return kind(**values | known)


def make_run(
    folder: Path,
    *,
    steps: int = 36,
    seed: int = 0,
    preset: str = "copris",
    gain: float = 0.4,
    seconds: float = 5.0,
    kl_reference: float | None = None,
) -> Path:
    """Fill ``folder`` with config, metrics, timeline, evaluations, samples and a log; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "trainer-0.log").write_text("{}\n", encoding="utf-8")
    config = validate_run_config(
        {
            "name": folder.name.lower(),
            "folder": str(folder),
            "seed": seed,
            "model": {"path": "recipe:countdown"},
            "schedule": {"preset": preset},
            "trainer": {"train_steps": steps},
        },
        "made",
    )
    write_run_config(config, folder / "config.yaml")
    reports = [step_report(s, steps, gain, seconds, kl_reference) for s in range(1, steps + 1)]
    write_lines(folder / "metrics.jsonl", [line for _, line in reports])
    write_lines(folder / "timeline.jsonl", _timeline(steps, seconds))
    write_lines(folder / "evaluations.jsonl", [_evaluation(v, steps, gain, seconds) for v in (0, steps)])
    write_lines(folder / "samples.jsonl", _samples(steps))
    return folder


def step_report(
    step: int, steps: int = 36, gain: float = 0.4, seconds: float = 5.0, kl_reference: float | None = None
) -> tuple[StepReport, dict[str, Any]]:
    """The report of one step, and its line of metrics.jsonl."""
    progress = 1 - float(np.exp(-3 * step / steps))
    staleness = {s: c for s, c in enumerate((40, 60, 20, 8)) if s < step}
    trajectories = sum(staleness.values())
    length = 64 + 76 * progress
    spread = SpreadStats(
        mean=sum(s * c for s, c in staleness.items()) / trajectories, max=max(staleness), histogram=staleness
    )
    report = filled(
        StepReport,
        train_step=step,
        loss=0.01,
        learning_rate=4e-4,
        rate_factor=1.0,
        grad_norm=0.3,
        updates=1,
        microbatches=4,
        forward_tokens=int(trajectories * (length + 20)),
        seconds={"evidence": 0.02 * seconds, "gradient": 0.3 * seconds, "update": 0.01 * seconds},
        batch=_batch_stats(spread, length, min(0.35, 0.1 * step) * (step > 1), 0.39 + gain * progress),
        policy=_policy_stats(trajectories, int(trajectories * length), 0.9 - 0.4 * progress, kl_reference),
    )
    engines = {"prefill_tokens": 4000, "reprefill_tokens": 500, "slot_seconds": 640.0, "running_slot_seconds": 480.0}
    drafts = {"drafted_tokens": 60, "accepted_tokens": 40, "wasted_tokens": 20, "draft_bytes": 4096}
    total = sum(1000 + 100 * done for done in range(step))
    mesh = {
        "goodput": 0.87,
        "trained_token_total": total,
        "dropped_groups": {"straggler_timeout": 1},
        "engines": {**engines, "speculation": {**drafts, "tokens_per_step": {"1": 2.0}}},
        "rounds_per_group": 1.0,
    }
    line = step_record(report, mesh) | {"policy_version": step, "wait_seconds": 0.5}
    return report, line | {"time": START + 10 + seconds * step}


def _batch_stats(spread: SpreadStats, length: float, off_policy: float, reward: float) -> BatchStats:
    count = sum(spread.histogram.values())
    return filled(
        BatchStats,
        groups=16,
        trajectories=count,
        rollouts_per_group=SpreadStats(mean=8.0, max=8, histogram={8: 16}),
        original_tokens=int(count * length),
        trained_tokens=int(count * length),
        reward_mean=reward,
        reward_std=0.4,
        outcome_mean=reward,
        advantage_abs_mean=0.6,
        all_right_groups=2,
        all_wrong_groups=1,
        truncated_share=0.02,
        off_policy_token_share=off_policy,
        version_span=spread,
        token_staleness=spread,
        trajectory_staleness=spread,
        response_length_mean=length,
        response_length_deciles=tuple(length * x for x in (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1.2, 1.6, 2.4, 4.0)),
        reverse_kl=0.3,
        top_token_share=0.9,
    )


def _policy_stats(trajectories: int, tokens: int, entropy: float, kl_reference: float | None) -> PolicyStats:
    shares = {"clipped_high": 0.008, "clipped_low": 0.004}
    ratio = filled(RatioStats, tokens=tokens, mean=1.0, std=0.05, min=0.4, max=2.1, **shares)
    return filled(
        PolicyStats,
        ratio=ratio,
        ratio_by_staleness={0: ratio},
        kl_behavior_k1=0.001,
        kl_behavior_k3=0.002,
        effective_sample_size=0.93 * trajectories,
        effective_sample_share=0.93,
        entropy=entropy,
        logprob_gap_pure=GapStats(tokens=tokens // 2, mean=1e-6, max=2e-5),
        forward_kl=0.2,
        kl_reference=kl_reference,
    )


def _timeline(steps: int, seconds: float) -> list[dict[str, Any]]:
    records = []
    for moment in range(int(20 + seconds * steps)):
        trained = min(steps, max(0, int((moment - 10) / seconds)))
        behind = max(0, trained - (1 if (moment - 10) % seconds < 2 else 0))
        waiting = {"pending": 30, "partial": 6, "leased": 176, "finished": 4, "open_groups": 28}
        ready = int(16 * ((moment % seconds) / seconds))
        generator = {"running": 88, "waiting": 0, "slots": 96, "serving": True}
        records.append(
            {
                "t": START + moment,
                "view": {"trained_step": trained, "policy_version": trained, "ready_groups": ready, **waiting},
                "generators": [
                    {"instance_id": f"g{i}", "policy_version": v, **generator} for i, v in enumerate((trained, behind))
                ],
                "generated_token_total": 2500.0 * (moment + 1),
                "dropped": {"straggler_timeout": 2, "filtered": 0},
            }
        )
    return records


def _evaluation(version: int, steps: int, gain: float, seconds: float) -> dict[str, Any]:
    mean = 0.39 + (gain if version else 0.0)
    return {
        "policy_version": version,
        "n": 256,
        "mean": mean,
        "standard_error": float(np.sqrt(mean * (1 - mean) / 256)),
        "mean_length": 64.0 if version == 0 else 140.0,
        "max_length": 512.0,
        "truncated_share": 0.01,
        "seconds": 3.0,
        "when": START + 20 + seconds * steps if version else START + 5,
    }


def _samples(steps: int) -> list[dict[str, Any]]:
    return [
        {
            "train_step": step,
            "trajectory_id": f"e0-{16 * step}.0",
            "prompt": "3 5 7 9 > 24 :",
            "completion": "3 + 5 = 8 ~ 16 , 7 + 9 = 16 ~ 8 , 3 * 5 = 15 ~ 9 ! <script>alert(1)</script>",
            "reward": float(step % 2),
            "policy_versions": [step - 1, step],
        }
        for step in range(1, steps + 1, 6)
    ]


def answers_of(page: Path) -> dict[str, Any]:
    """The data inside of a page."""
    found = re.search(r'<script type="application/json" id="recorded">(.*?)</script>', page.read_text("utf-8"), re.S)
    assert found is not None
    answers: dict[str, Any] = json.loads(found[1])
    return answers
