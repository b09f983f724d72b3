"""`rollmesh config validate` refuses a schedule that cannot work, with field, value and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rollmesh.cli.main import app

RUN = {"name": "refused", "model": {"path": "models/none"}}
AGENTS = {"rollout": {"program": "agent"}, "evaluation": {"before_and_after": False, "every_versions": 0}}
WHOLE_BATCH = {"trainer": {"algorithm": {"advantage": "reinforce_pp"}}}


@pytest.mark.parametrize(
    ("sections", "field", "remedy"),
    [
        ({"schedule": {"preset": "april", "on_stale": "restart"}}, "schedule.on_stale=restart", "set spare_groups=0"),
        (
            {"schedule": {"preset": "sync", "on_stale": "restart"}},
            "schedule.on_stale=restart with schedule.preset=sync",
            "take a preset with both (rollpacker, sorted)",
        ),
        (
            {"schedule": {"preset": "copris_paper", "on_stale": "set_aside"}},
            "schedule.on_stale=set_aside with schedule.preset=copris_paper",
            "set on_stale to pace, mask_old_segments or evict",
        ),
        ({"schedule": {"window_groups": 15}}, "schedule.window_groups=15 is below", "raise it to at least 16"),
        ({"schedule": {"window_groups": 81}}, "schedule.window_groups=81 is above", "set at most 80"),
        (
            {"schedule": {"preset": "sorted"}},
            "trainer.algorithm.advantage=grpo",
            "set trainer.algorithm.advantage=reinforce_pp",
        ),
        (
            {"schedule": {"preset": "sorted", "filter_zero_variance": True}, **WHOLE_BATCH},
            "schedule.filter_zero_variance=true",
            "set false",
        ),
        (
            {"schedule": {"harvest": "trajectory"}, **WHOLE_BATCH, **AGENTS},
            "schedule.harvest=trajectory (schedule.preset=copris) with rollout.program=agent",
            "set schedule.harvest=group",
        ),
        (
            {"schedule": {"preset": "streamrl", "part_groups": 5}},
            "schedule.part_groups=5 does not divide schedule.groups_per_batch=16",
            "set a divisor of it, or 0",
        ),
        (
            {"schedule": {"preset": "streamrl"}, "trainer": {"minibatches": 2}},
            "schedule.part_groups=2",
            "set trainer.minibatches=1 or part_groups=0",
        ),
        ({"schedule": {"preset": "streamrl"}, **WHOLE_BATCH}, "schedule.part_groups=2", "or part_groups=0"),
        (
            {"schedule": {"preset": "ulorl", "segment_tokens": 63}},
            "schedule.segment_tokens=63",
            "from rollout.partial_save_tokens=64",
        ),
        (
            {"schedule": {"preset": "ulorl", "segment_tokens": 513}},
            "schedule.segment_tokens=513",
            "to rollout.max_new_tokens=512, or 0",
        ),
        (
            {"schedule": {"segment_tokens": 64}, "generator": {"reload_every_versions": 2}},
            "schedule.segment_tokens=64 with generator.reload_every_versions=2",
            "set generator.reload_every_versions=1",
        ),
        (
            {"schedule": {"segment_tokens": 64, "pool_size": "auto"}},
            "schedule.pool_size=auto with schedule.segment_tokens=64",
            "set schedule.pool_size to a number or null",
        ),
        ({"schedule": {"spare_members": 1}, **AGENTS}, "schedule.spare_members=1", "set 0"),
        (
            {"schedule": {"preset": "dart"}, "trainer": {"algorithm": {"old_logprobs": "stage_end"}}},
            "trainer.algorithm.old_logprobs=stage_end needs a barrier, which schedule.preset=dart does not have",
            "or another source",
        ),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_with_field_value_and_remedy(
    tmp_path: Path, sections: dict[str, Any], field: str, remedy: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**RUN, "folder": str(tmp_path / "run"), **sections}))
    done = CliRunner().invoke(app, ["config", "validate", str(file)])
    message = " ".join(done.stderr.split())
    assert done.exit_code == 2, done.output
    assert field in message
    assert remedy in message
    assert not (tmp_path / "run").exists()
