"""The command ``rollmesh methods`` prints every method that a run file can name."""

from __future__ import annotations

from typing import get_args

from typer.testing import CliRunner

from rollmesh.algorithms.advantages.advantage_registry import ADVANTAGES
from rollmesh.algorithms.losses.loss_registry import LOSSES
from rollmesh.algorithms.old_logprobs import SOURCES
from rollmesh.algorithms.token_masks.mask_registry import MASKS
from rollmesh.cli.main import app
from rollmesh.config.old_logprob_methods import OLD_LOGPROB_METHODS
from rollmesh.config.replay_methods import REPLAY_METHODS, ReplayConfig
from rollmesh.config.sampler_methods import SAMPLER_METHODS
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.config.update_scales import UPDATE_SCALES
from rollmesh.curriculum.budgets.budget_registry import BUDGETS
from rollmesh.curriculum.planners.planner_registry import PLANNERS
from rollmesh.curriculum.shapers.shaper_registry import SHAPERS


def test_every_method_is_printed_with_its_point_options_and_source() -> None:
    result = CliRunner().invoke(app, ["methods"])
    assert result.exit_code == 0
    headings = {line for line in result.output.splitlines() if not line.startswith(" ")}
    points = {
        "sampler": SAMPLER_METHODS,
        "planner": PLANNERS,
        "group_shaper": SHAPERS,
        "budget": {"constant", *BUDGETS},
        "advantage": ADVANTAGES,
        "loss": LOSSES,
        "masks": MASKS,
        "old_logprobs": SOURCES,
        "update_scale": UPDATE_SCALES,
        "replay": REPLAY_METHODS,
    }
    assert headings == {f"{point}: {name}" for point, names in points.items() for name in names}
    assert "  options: longest_tokens (required), length_scale (0.1), tau (10.0)\n" in result.output
    assert result.output.count("  source: ") == len(headings)


def test_every_old_logprob_source_has_one_entry() -> None:
    named = get_args(AlgorithmConfig.model_fields["old_logprobs"].annotation)
    assert set(named) == set(SOURCES) == set(OLD_LOGPROB_METHODS)
    assert set(get_args(AlgorithmConfig.model_fields["update_scale"].annotation)) == set(UPDATE_SCALES)
    assert set(get_args(ReplayConfig.model_fields["by"].annotation)) == set(REPLAY_METHODS)
