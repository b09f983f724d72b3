"""Rows of searches in the countdown task, whose searchers differ from those that the packaged model was trained on."""

import json
import random
from pathlib import Path
from typing import Any

from rollmesh.config.load import load_config
from rollmesh.config.sft_config import SftConfig
from rollmesh.config.yaml_text import dump_yaml
from rollmesh.recipes.countdown.demonstrations import SearcherMix, draw_demonstration

PERSISTENT = SearcherMix(persistent_share=1.0, repeat_probability=0.0, max_trials=12)


def write_rows(file: Path, count: int, seed: int) -> Path:
    rng = random.Random(seed)
    drawn = [draw_demonstration(rng, PERSISTENT) for _ in range(count)]
    lines = [json.dumps({"prompt": d.puzzle.text, "response": d.response}) for d in drawn]
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def sft_file(folder: Path, name: str = "run", **sections: Any) -> Path:
    """A run file over rows in ``folder``, which are written if they are missing; its run folder has the file's name."""
    train, held_out = folder / "train.jsonl", folder / "held-out.jsonl"
    if not train.exists():
        write_rows(train, 48, seed=1)
        write_rows(held_out, 16, seed=2)
    fields: dict[str, Any] = {
        "name": "warm",
        "folder": str(folder / name),
        "seed": 3,
        "model": {"path": "recipe:countdown", **sections.pop("model", {})},
        "data": {"train": [str(train)], "evaluation": [str(held_out)], **sections.pop("data", {})},
        "trainer": {"learning_rate": 1e-3, "batch_rows": 8, "device": "cpu", **sections.pop("trainer", {})},
        **sections,
    }
    file = folder / f"{name}.yaml"
    file.write_text(dump_yaml(fields))
    return file


def sft_config(folder: Path, name: str = "run", **sections: Any) -> SftConfig:
    return load_config(SftConfig, sft_file(folder, name, **sections), (), {})
