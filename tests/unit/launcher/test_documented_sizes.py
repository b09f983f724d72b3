"""The worked examples of docs/operations.md against the estimate that ``rollmesh config validate`` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.recipes import recipe_file
from rollmesh.launcher.estimate import estimate

DOCUMENT = " ".join((Path(__file__).parents[3] / "docs" / "operations.md").read_text().split())


def large(batch: int, group: int, pool: int, prompt: int, response: int) -> RunConfig:
    schedule = {"groups_per_batch": batch, "group_size": group, "pool_size": pool, "max_staleness": 4}
    data: dict[str, Any] = {
        "name": "large",
        "folder": "unused",
        "model": {"path": "unused"},
        "data": {"max_prompt_tokens": prompt},
        "rollout": {"max_new_tokens": response, "partial_save_tokens": 1024},
        "generator": {"max_context_tokens": prompt + response},
        "schedule": {"preset": "copris", **schedule},
    }
    return RunConfig.model_validate(data)


def test_the_demos_queue_is_the_one_that_the_document_computes() -> None:
    found = estimate(load_run_config(recipe_file("countdown", "demo.yaml"), environ={}))
    assert f"5 * 16 * (512 + 8 * 6,316) = {found.queue_bytes / 1e6:.1f} MB in Redis" in DOCUMENT


@pytest.mark.parametrize(
    ("config", "words", "redis_gb"),
    [
        (large(32, 8, 256, 1000, 16_384), "160 * (8,000 + 8 * 134,012) = {:.0f} MB", 0.512),
        (large(128, 16, 2048, 1000, 32_768), "640 * (8,000 + 16 * 266,524) = {:.1f} GB", 8.0),
    ],
    ids=["7B", "32B"],
)
def test_the_large_examples_add_up(config: RunConfig, words: str, redis_gb: float) -> None:
    found = estimate(config)
    unit = 1e6 if words.endswith("MB") else 1e9
    assert words.format(found.queue_bytes / unit) in DOCUMENT
    assert found.expected_staleness == 1.0
    # 80% of it for the queue, and room for the fork of an AOF rewrite.
    assert 0.8 * redis_gb * 1e9 < found.queue_bytes * 1.25 * 2 <= redis_gb * 1e9
