"""AdamW with both moments in 8 bits, by bitsandbytes, whose state can be saved and filled in place."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.optim.adamw import AdamW8bit


class EightBitAdamW(AdamW8bit):
    """AdamW whose moments are 8-bit codes with one float32 scale per 256 elements; tensors below 4,096 keep float32.

    Source: 8-bit optimizers via block-wise quantization (Dettmers et al., 2022).
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, lr=lr, betas=betas)  # type: ignore[no-untyped-call]
        for index, group in enumerate(self.param_groups):
            for position, parameter in enumerate(group["params"]):
                self.init_state(group, parameter, index, position)  # type: ignore[no-untyped-call]
                self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32)

    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Update one parameter; the library counts in an int, and a saved state contains tensors only."""
        state = self.state[p]
        count = state["step"]
        state["step"] = int(count)
        super().update_step(group, p, gindex, pindex)  # type: ignore[no-untyped-call]
        state["step"] = count.fill_(state["step"])
