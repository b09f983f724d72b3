"""A run with the environment and the loss of examples/, from files beside its run file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.long


def test_a_run_trains_in_the_environment_and_with_the_loss_of_the_examples(small_run, tmp_path: Path) -> None:
    for name in ("own_environment.py", "own_loss.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    rows = ({"prompt": f"{i % 9 + 1} {i % 7 + 1} > {i % 5 + 1} :", "answer": i % 5 + 1} for i in range(40))
    (tmp_path / "numbers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    line = small_run(
        data={"source": {"type": "jsonl", "path": "numbers.jsonl"}},
        reward={"verifier": "numeric"},
        rollout={
            "program": "environment",
            "environment": "own_environment:GuessNumber",
            "environment_options": {"most_guesses": 3},
            "max_turns": 3,
        },
        evaluation={"before_and_after": False},
        trainer={
            "train_steps": 2,
            "sample_completions": 64,
            "algorithm": {"loss": "own_loss:capped", "loss_options": {"cap": 2.0}},
        },
    )
    done = line.run("up", str(line.run_file))

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(line.json_lines("metrics.jsonl")) == 2
    ended = [sample for sample in line.json_lines("samples.jsonl") if sample["finish_reason"] == "environment"]
    # The words of a reply are not in the small vocabulary.
    assert any("<unk>" in sample["completion"] for sample in ended)
