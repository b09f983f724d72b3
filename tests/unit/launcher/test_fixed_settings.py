"""Settings that may change when a run is continued, fixed settings, and the documents' advice on both."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rollmesh.config import RunConfig
from rollmesh.config.fixed_settings import FIXED, reason_to_keep
from rollmesh.launcher.run_folder import refused_changes

DOCS = Path(__file__).parents[3] / "docs"
BASE: dict[str, Any] = {"name": "x", "folder": "runs/x", "model": {"path": "models/tiny"}}
SECTIONS_THAT_MAY_CHANGE = ("launcher", "network", "telemetry", "security", "gateway", "agents")
MAY_CHANGE: dict[str, str] = {
    "data": "max_prompt_tokens",
    "rollout": (
        "agent.function_options agent.idle_timeout_seconds agent.open_on_first_call environment_timeout_seconds "
        "kept_tokens partial_save_tokens chunk_timeout_seconds placement most_waiting worker_concurrency"
    ),
    "reward": "address timeout_seconds workers memory_limit_bytes",
    "schedule": "cut_order part_groups segment_tokens pool_size straggler_timeout_seconds max_filtered_in_a_row",
    "generator": (
        "replicas device slots max_context_tokens kv_token_capacity on_new_version "
        "reload_at_once reload_every_versions canary_threshold "
        "refused_versions_limit drain_timeout_seconds pace cuda_graphs speculation "
        "sglang.url sglang.python sglang.arguments "
        "sglang.environment sglang.interrupt sglang.start_timeout_seconds sglang.request_timeout_seconds "
        "sglang.update_timeout_seconds sglang.admin_key"
    ),
    "trainer": (
        "train_steps learning_rate tokens_per_microbatch device share_prefixes gradient_checkpointing "
        "sample_completions algorithm.kl_reference_version nonfinite_updates_limit"
    ),
    "checkpoints": (
        "cache_folder cache_policies parallel_transfers object_store anchor_every_versions keep_last state_every_steps "
        "secret"
    ),
    "store": (
        "url password sentinel_password tls.ca tls.certificate tls.key tls.check_hostname appendfsync "
        "maxmemory_bytes heartbeat_seconds"
    ),
    "evaluation": "every_versions before_and_after",
    "curriculum": "sampler sampler_options",
}
"""Sections with fields of both kinds: those that may change."""


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every field that holds no section, by its whole name."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from fields_of(info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


TAUGHT: dict[str, Any] = {
    "teachers": {"math": {"model": "models/teacher", "top_k": 4}},
    "trainer": {"algorithm": {"teacher": {"reverse_kl_coefficient": 1}}},
}


def config(changes: dict[str, Any] | None = None) -> RunConfig:
    return RunConfig.model_validate({**BASE, **(changes or {})})


def test_every_setting_is_either_fixed_for_a_reason_or_may_change() -> None:
    fields = [f for f in fields_of(RunConfig) if f.split(".")[0] not in SECTIONS_THAT_MAY_CHANGE]
    free = {"folder", *(f"{section}.{name}" for section, names in MAY_CHANGE.items() for name in names.split())}
    assert {f for f in fields if reason_to_keep(f) is None} == free, "a new setting: decide"
    for name in " ".join(FIXED.values()).split():
        assert any(f == name or f.startswith(f"{name}.") for f in fields), f"{name} is no setting"


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"seed": 1}, "seed", "order of prompts"),
        ({"model": {"path": "models/other"}}, "model.path", "descends from it"),
        ({"model": {"path": "models/tiny", "adapter": {"rank": 8}}}, "model.adapter", "descends from it"),
        ({"data": {"source": {"type": "countdown", "max_numbers": 9}}}, "data.source.max_numbers", "order of prompts"),
        ({"rollout": {"max_new_tokens": 64}}, "rollout.max_new_tokens", "defines a rollout"),
        ({"schedule": {"group_size": 4}}, "schedule.group_size", "the queue applies it"),
        ({"curriculum": {"planner": "quorum"}}, "curriculum.planner", "defines a rollout"),
        ({"trainer": {"train_steps": 39}}, "trainer.train_steps", "only grow, and was 40"),
        ({"checkpoints": {"folder": "elsewhere"}}, "checkpoints.folder", "batch files"),
    ],
)
def test_what_the_data_of_a_run_depends_on_is_refused_by_name_and_with_the_reason(
    changes: dict[str, Any], field: str, reason: str
) -> None:
    (found,) = refused_changes(config(), config(changes)).items()
    assert found[0] == field
    assert reason in found[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": {"workers": 4, "timeout_seconds": 20}},
        {"rollout": {"worker_concurrency": 2048, "chunk_timeout_seconds": 99}},
        {"trainer": {"train_steps": 41, "learning_rate": 1e-7, "device": "cpu", "tokens_per_microbatch": 2048}},
        {"trainer": {"algorithm": {"kl_reference_version": 5}}},
        {"generator": {"slots": 8, "drain_timeout_seconds": 60, "canary_threshold": 0.5}},
    ],
)
def test_what_operators_tune_may_change_in_the_middle_of_a_run(changes: dict[str, Any]) -> None:
    assert refused_changes(config(), config(changes)) == {}
    assert refused_changes(config(changes), config(changes)) == {}


def test_services_of_a_teacher_may_change_in_a_run_and_what_they_compute_may_not() -> None:
    def refused(**changes: Any) -> dict[str, str]:
        teachers = {"math": TAUGHT["teachers"]["math"] | changes}
        return refused_changes(config(TAUGHT), config(TAUGHT | {"teachers": teachers}))

    served = {"address": "teachers:7070", "replicas": 3, "device": "cpu", "timeout_seconds": 900.0}
    assert refused(**served, tokens_per_microbatch=1024, sglang={"request_timeout_seconds": 60}) == {}
    for change in ({"model": "models/other"}, {"top_k": 8}, {"dtype": "bfloat16"}, {"on_error": "dead_letter"}):
        assert refused(**change).keys() == {f"teachers.math.{name}" for name in change}
    other = {"other": {"model": "models/other"}}
    assert refused_changes(config(TAUGHT), config(TAUGHT | {"teachers": other})).keys() == {
        "teachers.math",
        "teachers.other",
    }


def advice() -> Iterator[tuple[str, str]]:
    """Advice of the documents, point by point."""
    for runbook in sorted((DOCS / "runbooks").glob("*.md")):
        for section in re.findall(r"\*\*Do\.\*\*(.*?)\*\*Ignore\.\*\*", runbook.read_text(), re.DOTALL):
            for point in section.split("\n* "):
                yield runbook.name, point
    table = (DOCS / "operations.md").read_text().partition("## When things break")[2]
    for row in table.splitlines():
        yield "operations.md", row.rpartition("| ")[2]


def test_no_document_tells_people_to_change_what_a_run_keeps_without_a_new_run() -> None:
    settings = set(fields_of(RunConfig))
    named = 0
    for document, point in advice():
        for setting in re.findall(r"`([a-z_]+\.[a-z_.]*[a-z_])", point):
            if setting in settings:
                named += 1
                kept = reason_to_keep(setting)
                assert kept is None or "new run" in " ".join(point.split()), f"{document}: {setting}: {kept}"
    assert named > 20, "the documents were read"


def test_writing_out_the_numbers_of_the_preset_is_no_change_of_the_schedule() -> None:
    numbers = {"max_staleness": 4, "window_groups": 80, "on_stale": "pace", "spare_groups": 0}
    assert refused_changes(config({"schedule": numbers}), config()) == {}
    changed = refused_changes(config(), config({"schedule": {"window_groups": 79, "spare_members": 1}}))
    assert sorted(changed) == ["schedule.spare_members", "schedule.window_groups"]
