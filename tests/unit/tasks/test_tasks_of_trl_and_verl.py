"""The examples of docs/from-trl-or-verl.md, with a data file and a reward function as TRL and verl have them."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from rollmesh.config.load import validate_run_config
from rollmesh.tasks.sources.source_protocol import build_prompt_source
from rollmesh.tasks.verifiers.verifier_protocol import build_verifier
from rollmesh.text import Tokenizer

PAGE = (Path(__file__).parents[3] / "docs" / "from-trl-or-verl.md").read_text()
YAML, PYTHON = (re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) for kind in ("yaml", "python"))
MINIMAL = {"name": "page", "folder": "runs/page", "model": {"path": "recipe:countdown"}}
QUESTION = [{"role": "user", "content": "1+1"}]
VERL = {
    "data_source": "sums",
    "prompt": QUESTION,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}
OF_VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info == {"split": "train", "index": 0}
    return float(solution_str.endswith(ground_truth))
"""
OF_TRL = """
def accuracy_reward(completions, solution, level, **kwargs):
    return [s * (c[0]["content"] == right) for c, right, s in zip(completions, solution, level, strict=True)]
"""


@pytest.mark.parametrize(
    ("run", "module", "reward", "row"),
    [
        (YAML[0], PYTHON[0], OF_VERL, VERL),
        (YAML[1], PYTHON[1], OF_TRL, {"prompt": QUESTION, "solution": "2", "level": 1.0}),
    ],
    ids=["verl", "trl"],
)
def test_a_task_of_trl_or_verl_runs_with_the_lines_of_the_page(
    run: str,
    module: str,
    reward: str,
    row: dict[str, Any],
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "their_reward.py").write_text(reward)
    (tmp_path / "my_task.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("their_reward", "my_task"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("train", "test"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), f"{name}.parquet")
        Path(f"{name}.jsonl").write_text(json.dumps(row))

    config = validate_run_config({**MINIMAL, **yaml.safe_load(run)}, "the page")
    data = config.data.model_copy(update={"held_out_ratio": 0})
    prompt = build_prompt_source(data, tokenizer, 1).prompt(0, 0)
    verifier = build_verifier(config.reward.verifier, config.reward.options)

    assert tokenizer.decode(prompt.token_ids) == "[user]1+1[assistant]"
    assert [verifier.verify(answer, prompt.metadata) for answer in ("2", "3")] == [1.0, 0.0]
