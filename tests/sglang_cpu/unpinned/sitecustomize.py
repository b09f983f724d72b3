"""Lets the adapter code of the SGLang server run on a CPU; put on PYTHONPATH of the server.

Its layers ask for pinned memory, which torch only has next to an accelerator. A CPU copies from any memory.
"""

import functools
import pathlib
import runpy

import torch

runpy.run_path(str(pathlib.Path(__file__).parents[1] / "forking" / "sitecustomize.py"))


def _without_pinning(function):
    @functools.wraps(function)
    def unpinned(*args, pin_memory=False, **kwargs):
        return function(*args, **kwargs)

    return unpinned


for _name in ("tensor", "empty", "zeros", "ones", "arange", "full"):
    setattr(torch, _name, _without_pinning(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda tensor, device=None: tensor
