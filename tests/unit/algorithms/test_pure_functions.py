"""Shaping, KL estimators, masks."""

import json
import subprocess
import sys

import pytest
import torch

from rollmesh.algorithms.ratios import k1, k3
from rollmesh.algorithms.token_masks import MaskReason, mask_reasons, stale_mask
from rollmesh.curriculum.shapers import overlong_penalty


def test_overlong_penalty_matches_the_golden_vectors() -> None:
    # Budget 16384, buffer 2048: a wrong answer of 15360 tokens, and one at the cap.
    golden = {15360: -0.5, 16384: -1.0}
    assert {n: overlong_penalty(n, 16384, 2048) for n in golden} == golden


def test_overlong_penalty_falls_linearly_inside_the_buffer_only() -> None:
    values = [overlong_penalty(n, 100, 20) for n in (0, 80, 81, 90, 100, 150)]
    assert values == pytest.approx([0, 0, -0.05, -0.5, -1, -1])
    assert overlong_penalty(10**6, 100, 0) == 0.0


@pytest.mark.parametrize(("budget", "buffer"), [(0, 0), (10, -1), (10, 11)])
def test_overlong_penalty_refuses_impossible_buffers(budget: int, buffer: int) -> None:
    with pytest.raises(ValueError, match="overlong_penalty"):
        overlong_penalty(5, budget, buffer)


def test_shaping_does_not_load_torch() -> None:
    code = "import sys, json, rollmesh.curriculum.shapers; print(json.dumps('torch' in sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert json.loads(out.stdout) is False


def test_kl_estimators_average_to_the_exact_divergence() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(7).double().log_softmax(0), torch.randn(7).double().log_softmax(0)
    exact = float((p.exp() * (p - q)).sum())
    assert float((p.exp() * k1(p, q)).sum()) == pytest.approx(exact, abs=1e-12)
    assert float((p.exp() * k3(p, q)).sum()) == pytest.approx(exact, abs=1e-12)
    assert (k3(p, q) >= 0).all()


def test_stale_tokens_leave_the_mask_and_say_why() -> None:
    original = torch.tensor([False, True, True, True, False])
    staleness = torch.tensor([0, 0, 2, 3, 0])
    mask = stale_mask(staleness, original, 2)
    assert mask.tolist() == [False, True, True, False, False]
    assert torch.equal(stale_mask(staleness, original, None), original)
    reasons = mask_reasons(torch.tensor([True, False, False, False, False]), original, mask)
    assert [MaskReason(r).name for r in reasons.tolist()] == ["PROMPT", "TRAINED", "TRAINED", "STALE", "ENVIRONMENT"]
