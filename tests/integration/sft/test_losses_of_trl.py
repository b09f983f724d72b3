"""Losses of ``rollmesh sft`` beside those of TRL's SFTTrainer, on equal rows, order and batches, in float32."""

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from transformers import Qwen2Config
from typer.testing import CliRunner

from rollmesh.cli.main import app

from ...kit.chat_tokenizers import TAGGED, write_tokenizer
from ...kit.environments import python_of
from ...kit.models import write_model

ROOT = Path(__file__).resolve().parents[3]
STEPS, BATCH_ROWS, RATE = 50, 8, 1e-3


def write_rows(file: Path, chat: bool) -> None:
    """Sums; 100 rows, so that the 50 steps are several epochs whose last batch has fewer rows."""
    rng = random.Random(5)

    def ask() -> tuple[str, str]:
        a, b = rng.randrange(500), rng.randrange(500)
        return f"{a} + {b} =", f" {a + b}, " + ", ".join(str(rng.randrange(99)) for _ in range(rng.randrange(30)))

    rows: list[dict[str, Any]] = []
    for _ in range(100):
        turns = [ask() for _ in range(rng.randrange(1, 4) if chat else 1)]
        said = [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        rows.append({"messages": said} if chat else {"prompt": turns[0][0], "response": turns[0][1]})
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=320, num_key_value_heads=2, max_position_embeddings=512, **shape)
    write_model(folder, config, scale=2.0)
    write_tokenizer(folder / "tokenizer", TAGGED)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "tokenizer" / name).rename(folder / name)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[float]]:
    """TRL's losses of both kinds of rows: one process, because it takes long to import."""
    root = tmp_path_factory.mktemp("trl")
    jobs = []
    for chat in (False, True):
        data = root / f"rows-{chat}.jsonl"
        write_rows(data, chat)
        job = {"model": str(model), "data": str(data), "chat": chat, "history": str(root / f"history-{chat}.json")}
        jobs.append({**job, "batch_rows": BATCH_ROWS, "steps": STEPS, "learning_rate": RATE})
    (root / "jobs.json").write_text(json.dumps(jobs))
    script = ROOT / "benchmarks" / "trl_training.py"
    # -P: else the script's folder comes first, with benchmarks/queue.py for the module queue.
    done = subprocess.run(
        [python_of("trl"), "-P", script, root / "jobs.json"],
        env={
            "PYTHONPATH": str(ROOT / "services"),
            "HF_HOME": str(root),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {job["chat"]: [step["loss"] for step in json.loads(Path(job["history"]).read_text())] for job in jobs}


@pytest.mark.parametrize("chat", [False, True], ids=["prompt and response", "messages"])
def test_the_losses_are_those_of_trl(
    model: Path, expected: dict[bool, list[float]], chat: bool, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", chat)
    run = {
        "name": "beside-trl",
        "folder": str(tmp_path / "run"),
        "model": {"path": str(model)},
        "data": {"train": [str(tmp_path / "rows.jsonl")], "shuffle": False},
        "trainer": {"train_steps": STEPS, "batch_rows": BATCH_ROWS, "learning_rate": RATE, "device": "cpu"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    result = CliRunner().invoke(app, ["sft", str(tmp_path / "run.yaml")])
    assert result.exit_code == 0, result.output
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["train_step"] > 0]
    assert len(losses) == STEPS
    assert losses[-1] < 0.4 * losses[0], "the comparison is of a model that learns"
    np.testing.assert_allclose(losses, expected[chat], rtol=0, atol=1e-4)
