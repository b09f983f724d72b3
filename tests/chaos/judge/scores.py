"""Scores of the judge: log-probabilities by transformers' plain forward pass, and one replayed train step."""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from .files import BatchFile, RecordedSegment, RecordedTrajectory, RunFiles, SealedFolder

GAP_NATS = 1e-3
"""Largest allowed gap of a float32 engine's log-probability. Up to 4e-5 comes from float32 tables in transformers."""
REPLAY_SHARE = 0.02
"""Largest allowed distance of the published weights from the replayed ones, as a share of the step's update."""
_ADAPTER_FILE = "adapter_config.json"
_SEED = 20_110_715

_Sample: TypeAlias = list[tuple[RecordedTrajectory, int, RecordedSegment]]
"""Segments to score: trajectory, index of the segment's first token, segment."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: sequences are short, and on a busy machine several threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sampled(run: RunFiles, committed: int, per_step: int) -> dict[int, _Sample]:
    """Return the pure segments of ``per_step`` random trajectories of each step, by policy version."""
    samples: dict[int, _Sample] = defaultdict(list)
    for step in range(1, committed + 1):
        if step not in run.batches:
            continue
        members = list(run.batches[step].trajectories)
        for trajectory in random.Random(_SEED + step).sample(members, min(per_step, len(members))):
            at = len(trajectory.prompt_ids)
            for segment in trajectory.segments:
                if segment.by_policy and len(segment.token_ids) and segment.kv_min_version == segment.policy_version:
                    samples[segment.policy_version].append((trajectory, at, segment))
                at += len(segment.token_ids)
    return samples


def largest_gap(policy: Path, sample: _Sample) -> float:
    """Return the largest difference between log-probabilities of segments and the policy, in nats; inf for NaN."""
    model = _model(policy)
    worst = 0.0
    with torch.no_grad():
        for trajectory, at, segment in sample:
            end = at + len(segment.token_ids)
            values = _logprobs(model, trajectory, segment.temperature, end)[at - 1 :]
            gap = (values - torch.from_numpy(segment.logprobs).double()).abs().max()
            worst = max(worst, float(gap.nan_to_num(nan=torch.inf)))
    return worst


def replay_distance(state: SealedFolder, batch: BatchFile, published: Path) -> float | None:
    """Repeat the training of ``batch`` from a trainer state; return the distance to the published weights.

    The distance is a share of the update. None unless the settings are GRPO with or without the division by the
    standard deviation, clipped PPO over the sampler's log-probabilities, token mean and one minibatch, without masks
    but that of old tokens, and without teachers; None for an adapter, and for a batch whose tokens are all too old for
    the loss.
    """
    if (published / _ADAPTER_FILE).exists():
        return None
    settings = batch.footer["settings"]
    recipe = (settings or {}).get("recipe") or {}
    algorithm = recipe.get("algorithm", {})
    known = {"loss": "ppo_clip", "old_logprobs": "sampler", "aggregation": "token_mean"}
    plain = recipe.get("minibatches") == 1 and algorithm.get("advantage") in ("grpo", "dr_grpo")
    others = any(algorithm.get(key) for key in ("kl_coefficient", "masks", "teacher"))
    if not plain or others or any(algorithm.get(k) != v for k, v in known.items()):
        return None
    (file,) = state.record["files"]
    tensors = load_file(state.folder / file["path"])
    model = _model(published)
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = _loss(model, batch, algorithm, recipe.get("max_token_staleness"))
    if not loss.requires_grad:
        return None
    torch.autograd.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["max_grad_norm"])
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": recipe["weight_decay"]},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=settings["learning_rate"],
        betas=tuple(recipe["betas"]),
    )
    for name, parameter in model.named_parameters():
        moments = {key: tensors[f"optimizer.{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {k: v if k == "step" else v.double() for k, v in moments.items()}
    if norm.isfinite():
        optimizer.step()
    # The published weights are float32, whose neighbours near 1 are 1e-7 apart: more than a small update.
    after = {name: parameter.detach().float().double() for name, parameter in model.named_parameters()}
    moved = sum(float((wanted[name] - before[name]).square().sum()) for name in wanted)
    off = sum(float((wanted[name] - after[name]).square().sum()) for name in wanted)
    return float((off / moved) ** 0.5) if moved else float(off > 0)


def _loss(
    model: transformers.PreTrainedModel, batch: BatchFile, algorithm: Mapping[str, Any], most_stale: int | None
) -> Tensor:
    """Return GRPO's clipped surrogate, averaged over all policy tokens; those over ``most_stale`` steps add nothing."""
    steps = {int(version): step for version, step in batch.footer["version_train_steps"].items()}
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for _, members in batch.groups:
        rewards = torch.tensor([t.reward for t in members if t.scored], dtype=torch.float64)
        spread = rewards.std() if len(rewards) > 1 else torch.zeros(())
        advantages = rewards - rewards.mean()
        if algorithm["advantage"] == "grpo":
            advantages = advantages / (spread + 1e-6)
        for trajectory, advantage in zip((t for t in members if t.scored), advantages, strict=True):
            for segment, values, old in _columns(model, trajectory):
                tokens += len(old)
                if most_stale is not None and batch.train_step - 1 - steps[segment.policy_version] > most_stale:
                    continue
                ratio = (values - old).clamp(-20, 20).exp()
                clipped = ratio.clamp(1 - algorithm["clip_low"], 1 + algorithm["clip_high"])
                loss = torch.maximum(-ratio * advantage, -clipped * advantage)
                if advantage < 0 and algorithm["dual_clip"] is not None:
                    loss = loss.clamp(max=float(-algorithm["dual_clip"] * advantage))
                total = total + loss.sum()
    return total / max(tokens, 1)


def _columns(
    model: transformers.PreTrainedModel, trajectory: RecordedTrajectory
) -> Iterator[tuple[RecordedSegment, Tensor, Tensor]]:
    """Yield each segment of a policy with its current and its recorded log-probabilities."""
    at = len(trajectory.prompt_ids)
    by_temperature = {t: _logprobs(model, trajectory, t) for t in {s.temperature for s in trajectory.written}}
    for segment in trajectory.segments:
        end = at + len(segment.token_ids)
        if segment.by_policy and end > at:
            values = by_temperature[segment.temperature][at - 1 : end - 1]
            yield segment, values, torch.from_numpy(segment.logprobs).double()
        at = end


def _model(folder: Path) -> transformers.PreTrainedModel:
    """Load a policy; an adapter is added to the weights of its base, W + alpha / rank * B A."""
    if (folder / _ADAPTER_FILE).exists():
        settings = json.loads((folder / _ADAPTER_FILE).read_text())
        manifest = json.loads((folder / "manifest.json").read_text())
        model = _model(folder.parents[1] / manifest["base"]["path"])
        tensors = load_file(folder / "adapter_model.safetensors")
        for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
            layer = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            product = tensors[name.replace(".lora_A.", ".lora_B.")].double() @ tensors[name].double()
            with torch.no_grad():
                layer.get_parameter("weight").add_(product * settings["lora_alpha"] / settings["r"])
        return model
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", local_files_only=True
    )
    return loaded  # from_pretrained sets evaluation mode


def _ids(trajectory: RecordedTrajectory) -> Tensor:
    arrays = [trajectory.prompt_ids, *(s.token_ids for s in trajectory.segments)]
    return torch.cat([torch.from_numpy(array).long() for array in arrays])


def _logprobs(
    model: transformers.PreTrainedModel, trajectory: RecordedTrajectory, temperature: float, end: int | None = None
) -> Tensor:
    """Return log_softmax(z / T) over the kept set of each token up to ``end`` but the first, float64 [tokens - 1]."""
    ids = _ids(trajectory)[:end]
    logits: Tensor = model(input_ids=ids[None]).logits[0, :-1].double() / temperature
    outside = torch.zeros_like(logits)
    row = len(trajectory.prompt_ids) - 1
    for segment in trajectory.segments:
        for at, kept in enumerate(segment.kept[: max(0, len(logits) - row)], start=row):
            if len(kept):
                outside[at] = -torch.inf
                outside[at, torch.from_numpy(kept)] = 0
        row += len(segment.token_ids)
    return (logits + outside).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
