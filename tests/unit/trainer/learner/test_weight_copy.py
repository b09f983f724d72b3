"""The copy of the weights does not change with them, and its memory serves every version."""

from __future__ import annotations

import torch
from torch import nn

from rollmesh.trainer.learner.distributed import World
from rollmesh.trainer.learner.policy_files import WeightCopy


def tied_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    return model


def test_a_copy_keeps_the_weights_of_its_time_in_the_publishing_dtype() -> None:
    model, copy = tied_model(), WeightCopy(torch.float32)
    before = model[0].weight.detach().clone()
    taken = copy.take(dict(model.named_parameters()), World())
    with torch.no_grad():
        model[0].weight.add_(1.0)
    assert list(taken) == ["0.weight"], "tied weights occur once"
    assert torch.equal(taken["0.weight"], before)
    assert WeightCopy(torch.bfloat16).take(dict(model.named_parameters()), World())["0.weight"].dtype == torch.bfloat16


def test_the_next_copy_reuses_the_memory_of_the_last_one() -> None:
    model, copy = tied_model(), WeightCopy(torch.float32)
    place = copy.take(dict(model.named_parameters()), World())["0.weight"].data_ptr()
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    again = copy.take(dict(model.named_parameters()), World())["0.weight"]
    assert again.data_ptr() == place
    assert torch.equal(again, model[0].weight)


def test_only_rank_0_keeps_a_copy() -> None:
    assert WeightCopy(torch.float32).take(dict(tied_model().named_parameters()), World(rank=1, size=2)) == {}
