"""An environment that others wrote trains in a real mesh, from a run file that `config validate` has accepted."""

import json
from pathlib import Path

from .conftest import assert_rescored

ROWS = [{"prompt": f"{i % 9 + 1} {i % 7 + 1} > {i % 5 + 1} :", "answer": ""} for i in range(40)]
CLASS = """
class Claims:
    def reset(self, seed=None, options=None):
        self.turns = 0
        return " : ", {}

    def step(self, action):
        self.turns += 1
        return " : ", 0.5 * action, self.turns == 2, False, {}
"""
"""The first text and the reply are words of the model."""


def test_a_gymnasium_like_class_beside_the_run_file_trains(small_run, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (tmp_path / "claims.py").write_text(CLASS)
    line = small_run(
        data={"source": {"type": "jsonl", "path": "rows.jsonl"}},
        rollout={
            "program": "environment",
            "environment": "gymnasium",
            "environment_options": {"target": "claims:Claims", "action": {"!": 1, "?": 0}},
            "max_turns": 2,
            "max_new_tokens": 96,
            "max_attempts": 50,
        },
        evaluation={"before_and_after": False},
        generator={"replicas": 1},
        trainer={"train_steps": 2, "sample_completions": 64},
    )
    for command in (("config", "validate", str(line.run_file)), ("up", str(line.run_file), "--inline")):
        line.succeeds(*command)
    samples = line.json_lines("samples.jsonl")
    assert all(sample["completion"].startswith(":") for sample in samples)
    ended = [sample for sample in samples if sample["finish_reason"] == "environment"]
    assert len({sample["reward"] for sample in ended}) > 1
    assert all(sample["reward"] == sample["completion"].count("!") / 2 for sample in ended)
    assert {sample["completion"].count(":") for sample in ended} == {2}
    assert_rescored(line.audit())
