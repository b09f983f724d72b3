"""Small but real Hugging Face folders and batches for the checkpoint tests."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollmesh.checkpoints.batches import ReplayDraw, StepRecipe, StepSettings
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.errors import CheckpointError
from rollmesh.mesh import Cursor
from rollmesh.prompt_history import PromptOutcome
from rollmesh.types import (
    Batch,
    FinishReason,
    Group,
    OutcomeKind,
    PolicyRecord,
    Prompt,
    RewardOutcome,
    Segment,
    Trajectory,
)

SECRET = b"a secret of at least thirty-two b"
CANARY = [CanarySequence(token_ids=[1, 2, 3], logprobs=[-0.5, -1.25])] * 8


def write_model(
    seed: int = 0, hidden: int = 8, vocabulary: str = "a b c", template: str = ""
) -> Callable[[Path], None]:
    """A callable that fills a folder with a tiny Qwen2-shaped checkpoint."""

    def write(folder: Path) -> None:
        config = {
            "model_type": "qwen2",
            "vocab_size": 16,
            "hidden_size": hidden,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 16,
            "tie_word_embeddings": True,
        }
        (folder / "config.json").write_text(json.dumps(config))
        weights = np.random.default_rng(seed).standard_normal((16, hidden)).astype(np.float32)
        save_file({"model.embed_tokens.weight": weights}, folder / "model.safetensors")
        (folder / "tokenizer.json").write_text(json.dumps({"vocabulary": vocabulary.split()}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "c", "chat_template": template}))

    return write


def publish(
    store: CheckpointStore,
    version: int,
    session: str = "abc",
    step: int | None = None,
    write: Callable[[Path], None] | None = None,
    **fields: Any,
) -> PolicyRecord:
    """Publish a tiny policy, or what ``write`` writes; ``fields`` are other arguments of the store's call."""
    parent = version - 1 if version else None
    return store.publish(
        session=session,
        policy_version=version,
        train_step=version if step is None else step,
        write=write or write_model(version),
        **{"parent": parent, "canary": CANARY, **fields},
    )


def copy_of(folder: Path) -> Callable[[Path], None]:
    """A callable that fills another folder with the files of this one."""

    def write(copy: Path) -> None:
        shutil.copytree(folder, copy, dirs_exist_ok=True)

    return write


def write_adapter(folder: Path) -> None:
    """Fill a folder with a tiny PEFT adapter."""
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {
        f"{name}.lora_A.weight": np.ones((2, 8), np.float32),
        f"{name}.lora_B.weight": np.zeros((8, 2), np.float32),
    }
    save_file(weights, folder / "adapter_model.safetensors")


def publish_adapter(store: CheckpointStore, version: int, base: PolicyRecord) -> PolicyRecord:
    """Publish a tiny adapter above a base."""
    return publish(store, version, write=write_adapter, base=base)


def make_batch(step: int, group_ids: list[str] | None = None, seed: int = 0) -> Batch:
    """A batch with two groups of two mixed-version trajectories."""
    rng = np.random.default_rng(seed)
    groups = []
    for index, group_id in enumerate(group_ids or [f"e0-{2 * step}", f"e0-{2 * step + 1}"]):
        prompt = Prompt(
            prompt_id=group_id,
            token_ids=rng.integers(0, 16, 3).astype(np.int32),
            verifier="exact",
            metadata={"answer": "42"},
        )
        members = tuple(_trajectory(group_id, m, prompt, rng) for m in range(2))
        groups.append(Group(group_id=group_id, admission_index=2 * step + index, trajectories=members))
    return Batch(train_step=step, groups=tuple(groups))


CURSOR = Cursor(epoch=1, index=7)


def step_settings(
    learning_rate: float = 1e-6, kl_reference_version: int | None = None, **algorithm: Any
) -> StepSettings:
    """Settings of a train step with the defaults of a run file, but for these."""
    recipe = StepRecipe(
        algorithm=AlgorithmConfig(**algorithm),
        minibatches=1,
        max_grad_norm=1.0,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        max_token_staleness=None,
    )
    return StepSettings(learning_rate=learning_rate, kl_reference_version=kl_reference_version, recipe=recipe)


def write_batch(
    store: CheckpointStore,
    batch: Batch,
    cursor: Cursor,
    train_steps: Mapping[int, int] | None = None,
    settings: StepSettings | None = None,
    outcomes: Sequence[PromptOutcome] = (),
    replay: ReplayDraw | None = None,
) -> str:
    """Write a batch file, with the defaults of a run file as its settings unless others are given."""
    return store.write_batch(batch, cursor, train_steps or {}, settings or step_settings(), outcomes, replay)


def _trajectory(group_id: str, member: int, prompt: Prompt, rng: np.random.Generator) -> Trajectory:
    segments = tuple(
        Segment(
            token_ids=rng.integers(0, 16, 4).astype(np.int32),
            behavior_logprobs=-rng.random(4).astype(np.float32),
            policy_version=version,
            kv_min_version=version,
        )
        for version in (0, 1)
    )
    return Trajectory(
        trajectory_id=f"{group_id}.{member}",
        group_id=group_id,
        member_index=member,
        prompt=prompt,
        segments=segments,
        finish_reason=FinishReason.STOP,
        outcome=RewardOutcome(kind=OutcomeKind.SCORED, value=float(member), parts={"a": 1.0, "b": 2.0, "c": 3.0}),
        shaped_reward=float(member),
    )


def refused(call: Callable[..., object], *arguments: Any, **options: Any) -> CheckpointError:
    """Return the CheckpointError that a call raises."""
    with pytest.raises(CheckpointError) as caught:
        call(*arguments, **options)
    return caught.value


def flip(file: Path, at: int = -1) -> None:
    """Change one bit of a file."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def flip_object(objects: ObjectStore, key: str, at: int = -1) -> None:
    """Change one bit of an object."""
    content = bytearray(objects.read(key, 1 << 30))
    content[at] ^= 1
    objects.write(key, bytes(content))
