"""A run folder with plausible numbers: what the mesh writes, made by arithmetic instead of hours of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.config.load import validate_run_config, write_run_config

START = 1_800_000_000.0


def write_lines(file: Path, records: list[dict[str, Any]]) -> None:
    """JSON lines."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def make_run(
    folder: Path, *, steps: int = 36, seed: int = 0, preset: str = "copris", gain: float = 0.4, seconds: float = 5.0
) -> Path:
    """Fill ``folder`` with config, metrics, timeline, evaluations, samples and a log; returns it."""
    rng = np.random.default_rng(seed)
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
    write_lines(folder / "metrics.jsonl", [_step(rng, s, steps, gain, seconds) for s in range(1, steps + 1)])
    write_lines(folder / "timeline.jsonl", _timeline(rng, steps, seconds))
    write_lines(folder / "evaluations.jsonl", [_evaluation(v, steps, gain, seconds) for v in (0, steps)])
    write_lines(folder / "samples.jsonl", _samples(steps))
    return folder


def _step(rng: np.random.Generator, step: int, steps: int, gain: float, seconds: float) -> dict[str, Any]:
    progress = 1 - np.exp(-3 * step / steps)
    length = 64 + 76 * progress + rng.normal(0, 4)
    staleness = {"0": 40, "1": 60 if step > 1 else 0, "2": 20 if step > 2 else 0, "3": 8 if step > 3 else 0}
    count = sum(staleness.values())
    return {
        "train_step": step,
        "policy_version": step,
        "time": START + 10 + seconds * step,
        "reward_mean": float(0.39 + gain * progress + rng.normal(0, 0.03)),
        "length_mean": float(length),
        "length_p90": float(2.4 * length),
        "truncated_share": float(0.01 + 0.02 * progress),
        "staleness_mean": sum(int(k) * v for k, v in staleness.items()) / count,
        "staleness_max": max(int(k) for k, v in staleness.items() if v),
        "staleness_counts": staleness,
        "trained_tokens": int(128 * length),
        "step_seconds": 0.4 * seconds,
        "off_policy_token_share": float(min(0.35, 0.1 * step) + rng.normal(0, 0.015)) if step > 1 else 0.0,
        "effective_sample_size": float(0.93 + rng.normal(0, 0.01)),
        "clip_fraction": float(abs(0.012 + rng.normal(0, 0.003))),
    }


def _timeline(rng: np.random.Generator, steps: int, seconds: float) -> list[dict[str, Any]]:
    records, tokens = [], 0.0
    for moment in range(int(20 + seconds * steps)):
        trained = min(steps, max(0, int((moment - 10) / seconds)))
        behind = max(0, trained - (1 if (moment - 10) % seconds < 2 else 0))
        first, second = int(rng.integers(80, 97)), int(rng.integers(80, 97))
        tokens += 2500 + float(rng.normal(0, 300))
        view = {
            "trained_step": trained,
            "policy_version": trained,
            "pending": int(rng.integers(10, 60)),
            "partial": int(rng.integers(0, 12)),
            "leased": first + second,
            "finished": int(rng.integers(0, 9)),
            "open_groups": int(rng.integers(24, 32)),
            "ready_groups": int(16 * ((moment % seconds) / seconds)),
        }
        generators = [
            {"instance_id": f"g{i}", "policy_version": v, "running": r, "waiting": 0, "slots": 96, "serving": True}
            for i, (v, r) in enumerate(((trained, first), (behind, second)))
        ]
        records.append(
            {
                "t": START + moment,
                "view": view,
                "generators": generators,
                "generated_token_total": tokens,
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
        "p50": 32.0,
        "p90": 167.0,
        "p99": 481.0,
        "truncated": 0.01,
        "seconds": 3.0,
        "when": "after" if version else "before",
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
