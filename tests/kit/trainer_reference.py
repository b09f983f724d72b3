"""A plain train step for comparison: one padded sequence at a time, plain loops, torch's own AdamW."""

import math
import statistics
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rollmesh.kept_sets import slice_sets
from rollmesh.types import Batch, SegmentSource, Trajectory


class ReferenceTrainer:
    """GRPO with PPO-clip, token-mean, behavior_logprobs as the denominator; float64."""

    def __init__(self, folder: Path, rate: float, max_grad_norm: float, dual_clip: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.max_grad_norm = max_grad_norm
        self.dual_clip = dual_clip

    def step(self, batch: Batch, oldest_version: int = 0) -> tuple[float, float]:
        """One update; tokens of versions older than ``oldest_version`` leave the numerator. (loss, gradient norm)."""
        members = [t for g in batch.groups for t in g.trajectories]
        count = sum(len(s) for t in members for s in t.segments if s.source is SegmentSource.POLICY)
        self.optimizer.zero_grad()
        total = 0.0
        for group in batch.groups:
            rewards = [t.shaped_reward for t in group.trajectories]
            scale = statistics.stdev(rewards) + 1e-6
            for member in group.trajectories:
                advantage = (member.shaped_reward - statistics.fmean(rewards)) / scale
                loss = self._loss(member, advantage, oldest_version) / count
                loss.backward()
                total += float(loss.detach())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        return total, float(norm)

    def _loss(self, member: Trajectory, advantage: float, oldest_version: int) -> Tensor:
        ids = [*member.prompt.token_ids.tolist(), *member.response_ids.tolist()]
        logits = self.model(input_ids=torch.tensor([ids])).logits[0]
        total = torch.zeros((), dtype=torch.float64) * logits.sum()
        position = len(member.prompt.token_ids)
        for segment in member.segments:
            for k in range(len(segment)):
                if segment.behavior_logprobs is not None and segment.policy_version >= oldest_version:
                    row = logits[position - 1] / segment.temperature
                    kept = [] if segment.kept_sets is None else slice_sets(segment.kept_sets, k, k + 1).ids.tolist()
                    logprob = row[ids[position]] - (row[kept] if kept else row).logsumexp(-1)
                    ratio = (logprob - float(segment.behavior_logprobs[k])).exp()
                    total = total + self._token(ratio, advantage)
                position += 1
        return total

    def _token(self, ratio: Tensor, advantage: float) -> Tensor:
        value = float(ratio.detach())
        if advantage >= 0:
            return -advantage * (ratio if value <= 1.28 else torch.full_like(ratio, 1.28).detach())
        if value < 0.8:
            return torch.full_like(ratio, -advantage * 0.8).detach()
        return -advantage * ratio if value <= self.dual_clip else torch.full_like(ratio, -advantage * self.dual_clip)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Weights of an exported folder, by name, in its own dtype."""
    adapter = folder / "adapter_model.safetensors"
    if adapter.is_file():
        return load_file(adapter)
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Largest absolute difference between two sets of weights with the same names."""
    assert left.keys() == right.keys()
    return max(
        (float((left[n].detach().double() - right[n].detach().double()).abs().max()) for n in left), default=math.nan
    )
