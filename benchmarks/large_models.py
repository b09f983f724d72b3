"""What a large model costs beside its layers: the head over 151,936 words, and an update with moments on the host.

CPU seconds with one thread, in turn, median; memory by the allocations of tensors. The baseline of the head is torch's
``log_softmax`` with its own gradient, checkpointed in chunks of as many logits.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.allocation import peak_bytes
from benchmarks.frame import Measure, at_least, at_most, compared, interleaved
from rollmesh.config.trainer import TrainerConfig
from rollmesh.trainer.learner.policy_state import build_optimizer
from rollmesh.trainer.learner.token_scores import CHUNK_LOGITS, score_tokens

_WORDS, _WIDTH, _TOKENS = 151_936, 64, 440


def measure_large(repetitions: int) -> list[Measure]:
    """Measure head and update; a ratio of rates is ours divided by the baseline's."""
    return [*_head(repetitions), _update(repetitions)]


def _head(repetitions: int) -> list[Measure]:
    torch.manual_seed(0)
    weight, hidden = torch.randn(_WORDS, _WIDTH, requires_grad=True), torch.randn(_TOKENS, _WIDTH, requires_grad=True)
    targets = torch.randint(0, _WORDS, (_TOKENS,))

    def ours() -> Tensor:
        return score_tokens(hidden, weight, None, targets, None, entropy=True)[0]

    def chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        scores = (hidden @ weight.T).log_softmax(-1)
        with torch.no_grad():
            entropy = torch.special.entr(scores.exp()).sum(-1)
        return scores.gather(-1, targets[:, None])[:, 0], entropy

    def plain() -> Tensor:
        rows = CHUNK_LOGITS // _WORDS
        chunks = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
        return torch.cat([checkpoint(chunk, *part, use_reentrant=False)[0] for part in chunks])

    def gradient(scores: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            weight.grad = hidden.grad = None
            torch.autograd.backward(scores().sum())

        return run

    work = {"ours": gradient(ours), "plain": gradient(plain)}
    rate = {name: _TOKENS / seconds for name, seconds in interleaved(work, repetitions).items()}
    mega = {name: peak_bytes(run) / 1e6 for name, run in work.items()}
    name, other = f"head over {_WORDS:,} words, with its gradient", "log_softmax and checkpoints in chunks"
    return [
        compared(name, rate["ours"], "tokens per cpu-second", other, rate["plain"], (at_least("ratio", 1.5),)),
        compared(f"{name}: memory", mega["ours"], "MB", other, mega["plain"], (at_most("ratio", 0.5),)),
    ]


def _update(repetitions: int) -> Measure:
    def update(optimizer: Literal["adamw", "adamw_offload"]) -> Callable[[], object]:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
        built = build_optimizer(model, TrainerConfig(optimizer=optimizer))
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        return built.step

    work = {"adamw_offload": update("adamw_offload"), "adamw": update("adamw")}
    milli = {name: 1e3 * seconds for name, seconds in interleaved(work, 4 * repetitions).items()}
    name = "update of 8.4 million parameters, adamw_offload"
    return compared(name, milli["adamw_offload"], "cpu-ms", "adamw", milli["adamw"])
