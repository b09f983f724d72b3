"""Supervised fine-tuning beside TRL's SFTTrainer: equal model, rows, order, batches and settings, float32.

CPU seconds of the steps after the first, in pairs: a process of TRL (``trl_training.py``), then ours; the median
counts. TRL pads a batch to its longest row; what packs without padding there needs FlashAttention.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.frame import Measure, at_least, compared
from benchmarks.models import SMALL, write_random_model
from benchmarks.processes import train_with_trl
from rollmesh.config.sft_config import RowOptions, SftTrainerConfig
from rollmesh.errors import DataError
from rollmesh.sft.sft_trainer import SftTrainer
from rollmesh.sft.training_rows import read_rows
from rollmesh.text import Tokenizer as RunTokenizer
from rollmesh.trainer.learner.distributed import World
from rollmesh.trainer.learner.policy_learner import PolicyLearner
from tests.kit.environments import ENVIRONMENTS, NotInstalled

_CASES: Mapping[str, tuple[Mapping[str, int], int]] = {
    "the demo's size": (SMALL, 9),
    "width 512": ({"hidden_size": 512, "num_hidden_layers": 2, "intermediate_size": 1536}, 3),
}
"""Shape of the model and number of steps, of which the first is not measured."""
_BATCH_ROWS, _RATE, _LONGEST = 32, 1e-3, 600


def measure_fine_tuning(pairs: int) -> list[Measure]:
    """Measure both shapes; a ratio is our tokens per CPU second divided by TRL's. Nothing without its environment."""
    try:
        python = ENVIRONMENTS["trl"].find_python()
    except NotInstalled as error:
        print(f"not measured beside TRL's SFTTrainer: {error}", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        return [_measure(Path(folder) / name, name, python, pairs) for name in _CASES]


def _measure(root: Path, name: str, python: Path, pairs: int) -> Measure:
    shape, steps = _CASES[name]
    model = root / "model"
    write_random_model(model, {**shape, "vocab_size": 258, "max_position_embeddings": 1024})
    _write_tokenizer(model)
    _write_rows(root / "rows.jsonl", steps * _BATCH_ROWS)
    measured = []
    for _ in range(pairs):
        theirs, losses = _trl(root, python, steps)
        tokens, seconds, own = _ours(root, steps)
        if max(abs(a - b) for a, b in zip(own, losses, strict=True)) > 1e-3:
            raise DataError(f"bench train: the losses of TRL are {losses}, ours are {own}")
        measured.append((theirs / seconds, tokens / seconds, tokens / theirs))
    _, ours, other = sorted(measured)[pairs // 2]
    bars = (at_least("ratio", 1.5),)
    return compared(f"sft, {name}", ours, "target tokens per cpu-second", "TRL's SFTTrainer", other, bars)


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def _write_rows(file: Path, count: int) -> None:
    """Write answers with lengths as in the train bench: median 99, at most 520."""
    rng = random.Random(0)
    lengths = [min(520, max(8, round(rng.lognormvariate(4.6, 0.9)))) for _ in range(count)]
    letters = ("".join(rng.choices("abcdefgh ", k=length)) for length in lengths)
    rows = ({"prompt": "What is next?", "response": f" {text}"} for text in letters)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _ours(root: Path, steps: int) -> tuple[int, float, list[float]]:
    """Return the target tokens and the CPU seconds of the steps after the first, and the losses of all."""
    config = SftTrainerConfig(learning_rate=_RATE, batch_rows=_BATCH_ROWS)
    rows = read_rows([root / "rows.jsonl"], RunTokenizer(root / "model"), RowOptions(), _LONGEST)
    learner = PolicyLearner.load(
        root / "model", config, dtype="float32", adapter=None, world=World(), longest=_LONGEST, device="cpu"
    )
    trainer = SftTrainer(learner, config, steps, seed=0)
    times, done = [], []
    for at in range(0, len(rows), _BATCH_ROWS):
        done.append(trainer.train(rows[at : at + _BATCH_ROWS]))
        times.append(time.process_time())
    return sum(step.trained_tokens for step in done[1:]), times[-1] - times[0], [step.loss for step in done]


def _trl(root: Path, python: Path, steps: int) -> tuple[float, list[float]]:
    """Return the CPU seconds of the steps after the first, and the losses of all."""
    job = {"model": str(root / "model"), "data": str(root / "rows.jsonl"), "chat": False, "batch_rows": _BATCH_ROWS}
    job |= {"steps": steps, "learning_rate": _RATE}
    found = train_with_trl(python, root, job, threads=torch.get_num_threads())
    return found[-1]["cpu_seconds"] - found[0]["cpu_seconds"], [float(step["loss"]) for step in found]
