"""Code of a user beside the run file: what raises in its service ends the run with its line."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.long

MINE = """
import sys
from rollmesh.algorithms.losses import ppo_clip

IS_TRIAL = "preflight" in sys.argv[0]

def loss(data, options):
    return ppo_clip(data, options) if IS_TRIAL else data.missing

def verify(response, metadata):
    return IS_TRIAL or {}["nope"]
"""
RUN = {
    "name": "own",
    "folder": "run",
    "model": {"path": "recipe:countdown"},
    "data": {"source": {"type": "countdown", "puzzles": 64}, "max_prompt_tokens": 64},
    "schedule": {"preset": "sync", "groups_per_batch": 2, "group_size": 2},
    "rollout": {"max_new_tokens": 16},
    "generator": {"max_context_tokens": 128},
    "evaluation": {"before_and_after": False},
    "gateway": {"enabled": False},
}
ROWS = {"source": {"type": "jsonl", "path": "rows.jsonl"}, "max_prompt_tokens": 64}
LOSS = {"train_steps": 2, "algorithm": {"loss": "mine:loss", "advantage": "dr_grpo", "skip_zero_advantage": False}}


@pytest.mark.parametrize(
    ("changed", "message", "line"),
    [
        ({"trainer": LOSS}, "trainer.algorithm.loss=mine:loss: raised AttributeError", 8),
        ({"data": ROWS, "reward": {"verifier": "mine:verify"}}, "without a reward: mine:verify: KeyError: 'nope'", 11),
    ],
)
def test_an_error_of_a_users_code_in_a_service_ends_the_run_with_its_line_and_is_not_retried(
    tmp_path: Path, changed: dict[str, object], message: str, line: int
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    rows = [f'{{"prompt": "1 2 {n} > 7 :", "answer": "7"}}\n' for n in range(3, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, **changed}))
    command = [sys.executable, "-P", "-m", "rollmesh.cli.main", "up", "run.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert f"({tmp_path / 'mine.py'}:{line})" in done.stderr
    log = (tmp_path / "run" / "logs" / "trainer-0.log").read_text()
    assert log.count("service_failed") <= 1, "the trainer was started again"
