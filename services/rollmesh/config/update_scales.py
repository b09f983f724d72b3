"""Update scales by their name in the run file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import Field

from rollmesh.config.methods import Method
from rollmesh.config.section import Section


class EssOptions(Section):
    """Options of ess."""

    base: float = Field(default=1.0, gt=0, le=1)
    """rho_base: share of the effective sample size from which on the rate is not lowered."""
    rule: Literal["sqrt", "linear"] = "sqrt"
    """Power of the share: 1/2 or 1."""


UPDATE_SCALES: Mapping[str, Method] = MappingProxyType(
    {
        "none": Method(source="the learning rate of the run file"),
        "ess": Method(
            source="VCPO, arXiv 2602.17616",
            options=EssOptions,
            deviation="the factor only, not its baseline; weights over the tokens in the loss",
        ),
    }
)
