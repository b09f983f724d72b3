"""A run folder whose batch files, policies and trainer states are real: tiny random models wrote every logprob.

The logprobs come from the plain Hugging Face forward pass, one sequence at a time: another path than the packed one
that the audit takes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollmesh.checkpoints.batches import StepSettings
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.config.load import validate_run_config, write_run_config
from rollmesh.kept_sets import slice_sets
from rollmesh.mesh import Cursor
from rollmesh.types import (
    Batch,
    Float32Array,
    Group,
    Int32Array,
    KeptSets,
    Segment,
    SegmentSource,
    Trajectory,
)

from ...kit.checkpoint_samples import publish, write_batch
from ...kit.made_batches import CONFIGS, VOCAB, sets_of, trajectory

STEPS = 6
GROUPS = 2
MEMBERS = 2
SECRET = "0123456789abcdef" * 4
SEGMENT = 5
"""Tokens of every policy segment."""


@dataclass(frozen=True, slots=True)
class MadeRun:
    """Folder of the run and access to its store."""

    folder: Path

    @property
    def store(self) -> CheckpointStore:
        """The checkpoint store."""
        return CheckpointStore(self.folder / "checkpoints", SECRET.encode())

    def change_config(self, **sections: dict[str, Any]) -> None:
        """Write the run file again with other values in these sections."""
        file = self.folder / "config.yaml"
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
        for section, values in sections.items():
            for name, value in values.items():
                inner = data[section].get(name)
                data[section][name] = {**inner, **value} if isinstance(inner, dict) else value
        write_run_config(validate_run_config(data, "changed"), file)

    def replace_batch(
        self, train_step: int, change: Callable[[Batch], Batch], settings: StepSettings | None = None
    ) -> None:
        """Write another batch file in the place of one."""
        batch = self.store.read_batch(train_step)
        (self.folder / "checkpoints" / "batches" / f"{train_step:08d}.pb").unlink()
        write_batch(self.store, change(batch), Cursor(), settings=settings)

    def replace_batches(self, change: Callable[[Batch], Batch]) -> None:
        """Write every batch file again."""
        for step in range(1, STEPS + 1):
            self.replace_batch(step, change)


def rewritten(change: Callable[[Trajectory], Trajectory], only: str = "") -> Callable[[Batch], Batch]:
    """A change of the trajectories of a batch, or of one of them."""

    def rewrite(batch: Batch) -> Batch:
        groups = []
        for group in batch.groups:
            members = (change(t) if only in ("", t.trajectory_id) else t for t in group.trajectories)
            groups.append(replace(group, trajectories=tuple(members)))
        return replace(batch, groups=tuple(groups))

    return rewrite


def resampled(change: Callable[[Segment], Segment], only: str = "") -> Callable[[Batch], Batch]:
    """A change of the segments that a policy wrote."""

    def change_all(trajectory: Trajectory) -> Trajectory:
        segments = (change(s) if s.source is SegmentSource.POLICY else s for s in trajectory.segments)
        return replace(trajectory, segments=tuple(segments))

    return rewritten(change_all, only)


def off_by(nats: float, *, last: bool = False) -> Callable[[Segment], Segment]:
    """The segment with other log-probabilities, of all tokens or of the last one."""

    def change(segment: Segment) -> Segment:
        assert segment.behavior_logprobs is not None
        logprobs = segment.behavior_logprobs.copy()
        logprobs[-1 if last else 0 :] += np.float32(nats)
        return replace(segment, behavior_logprobs=logprobs)

    return change


def make_audited_run(folder: Path) -> MadeRun:
    """Policies 0 to STEPS, one batch file and one committed state per step, config and secret."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True)
    (folder / "secret").write_text(SECRET, encoding="ascii")
    config = {
        "name": "audited",
        "folder": str(folder),
        "model": {"path": "made"},
        "schedule": {"groups_per_batch": GROUPS, "group_size": MEMBERS},
        "trainer": {"train_steps": STEPS, "device": "cpu"},
        "generator": {"on_new_version": "keep_kv"},
    }
    write_run_config(validate_run_config(config, "made"), folder / "config.yaml")
    run = MadeRun(folder)
    rng = np.random.default_rng(7)
    policies: list[PreTrainedModel] = []
    for step in range(STEPS + 1):
        policies.append(_policy(policies[-1] if policies else None, step))
        if step:
            write_batch(run.store, _batch(rng, policies, step), Cursor(epoch=0, index=GROUPS * step))
        tensors = {"weight": torch.full((2,), float(step))}
        run.store.save_state(session=f"s{step}", train_step=step, rollback_count=0, tensors=tensors, extra={})
        run.store.mark_announced(publish(run.store, step, session=f"s{step}", write=partial(_save, policies[-1])))
    return run


def word_level_tokenizer() -> Tokenizer:
    """One word per id."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _policy(parent: PreTrainedModel | None, step: int) -> PreTrainedModel:
    """A random model, or its parent after a large random step."""
    config = CONFIGS["qwen2"]()
    torch.manual_seed(step)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        if parent is None:
            for parameter in model.parameters():
                # The default initialisation gives nearly uniform distributions, which would hide errors.
                parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
        else:
            model.load_state_dict(parent.state_dict())
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


def _save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    word_level_tokenizer().save(str(folder / "tokenizer.json"))


def _batch(rng: np.random.Generator, policies: list[PreTrainedModel], step: int) -> Batch:
    """Groups whose members were written by the newest policy, by older ones too, or with another one's cache."""
    current = step - 1
    older = max(0, current - 2)
    plans = (
        [("policy", current)],
        [("policy", older), ("truncated", current)],
        [("policy", current), ("environment", 0), ("policy", current)],
        [("policy", older), ("mixed", current)],
    )
    groups = []
    for g in range(GROUPS):
        index = (step - 1) * GROUPS + g
        prompt = _ids(rng, 4)
        members = tuple(
            _trajectory(rng, policies, prompt, f"e0-{index}", m, plans[g * MEMBERS + m]) for m in range(MEMBERS)
        )
        groups.append(Group(group_id=f"e0-{index}", admission_index=index, trajectories=members))
    return Batch(train_step=step, groups=tuple(groups))


def _trajectory(
    rng: np.random.Generator,
    policies: list[PreTrainedModel],
    prompt: Int32Array,
    group_id: str,
    member: int,
    plan: list[tuple[str, int]],
) -> Trajectory:
    context, segments = prompt, []
    for kind, version in plan:
        ids = _ids(rng, SEGMENT)
        written = kind != "environment"
        sets = sets_of([np.union1d(_ids(rng, 5), token).tolist() for token in ids]) if kind == "truncated" else None
        segments.append(
            Segment(
                token_ids=ids,
                behavior_logprobs=hf_logprobs(policies[version], context, ids, kept_sets=sets) if written else None,
                policy_version=version,
                kv_min_version=max(0, version - 1) if kind == "mixed" else version,
                source=SegmentSource.POLICY if written else SegmentSource.ENVIRONMENT,
                kept_sets=sets,
            )
        )
        context = np.concatenate([context, ids])
    return trajectory(f"{group_id}.{member}", segments, float(member), prompt=prompt)


@torch.no_grad()
def hf_logprobs(
    model: PreTrainedModel,
    context: Int32Array,
    ids: Int32Array,
    temperature: float = 1.0,
    kept_sets: KeptSets | None = None,
) -> Float32Array:
    """log_softmax(z / T) of ``ids`` after ``context``, by the plain forward pass, float32 [tokens]."""
    tokens = torch.from_numpy(np.concatenate([context, ids]).astype(np.int64))
    logits = model(tokens[None]).logits[0, len(context) - 1 : -1].float() / temperature
    for row in range(len(ids) if kept_sets is not None else 0):
        outside = np.setdiff1d(np.arange(VOCAB), slice_sets(kept_sets, row, row + 1).ids)
        logits[row, outside] = -torch.inf
    return logits.log_softmax(-1).gather(-1, tokens[len(context) :, None])[:, 0].numpy()


def _ids(rng: np.random.Generator, count: int) -> Int32Array:
    return rng.integers(0, VOCAB, count).astype(np.int32)
