"""Token masks by their name in the run file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from rollmesh.config.methods import Method, check_name, complete_options
from rollmesh.config.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskMethod(Method):
    """One token mask."""

    needs: Literal["old_logprobs", "policy"]
    """old_logprobs: pi_old from the trainer; policy: log-probabilities and entropy at the start of the step."""
    whole_batch: bool = False
    """Decides about a token from those of other trajectories too."""


def _ordered(bounds: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= bounds[0] <= 1 <= bounds[1]:
        raise ValueError("expected [low, high] with 0 <= low <= 1 <= high")
    return bounds


Bounds = Annotated[tuple[float, float], AfterValidator(_ordered)]
"""[low, high] of a ratio."""


class IcepopOptions(Section):
    """Options of icepop."""

    low: float = Field(default=0.5, ge=0, le=1)
    """Smallest pi_old / mu of a kept token."""
    high: float = Field(default=5.0, ge=1)
    """Largest pi_old / mu of a kept token."""


class RatioOptions(Section):
    """Options of ratio."""

    token: Bounds | None = None
    """Bounds of pi_old / mu of a token."""
    sequence: Bounds | None = None
    """Bounds of the product over an answer."""
    geometric: Bounds | None = None
    """Bounds of the geometric mean over an answer."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """An answer with a token ratio below it is masked."""

    @model_validator(mode="after")
    def _masks_something(self) -> Self:
        if self.token is None and self.sequence is None and self.geometric is None and self.veto is None:
            raise ValueError("set at least one of token, sequence, geometric and veto")
        return self


class OpsmOptions(Section):
    """Options of opsm."""

    delta: float = Field(default=1e-4, ge=0)
    """Largest KL(mu || pi_old) per token, in nats, of a kept answer with a negative advantage."""


class M2poOptions(Section):
    """Options of m2po."""

    threshold: float = Field(default=0.04, gt=0)
    """Largest mean of log(pi_old / mu)^2 over the kept tokens of the batch."""


class MasteredOptions(Section):
    """Options of mastered."""

    entropy: float = Field(default=0.2, gt=0)
    """sigma: an answer with a smaller mean entropy, in nats, is mastered."""
    probability: float = Field(default=0.99, gt=0, lt=1)
    """tau: smallest probability of a masked token."""


MASK_METHODS: Mapping[str, MaskMethod] = MappingProxyType(
    {
        "icepop": MaskMethod(
            source="IcePop, as in verl",
            options=IcepopOptions,
            needs="old_logprobs",
            deviation="the mask only; loss tis or decoupled_ppo adds the weight",
        ),
        "ratio": MaskMethod(source="verl", options=RatioOptions, needs="old_logprobs"),
        "opsm": MaskMethod(
            source="slime",
            options=OpsmOptions,
            needs="old_logprobs",
            deviation="against the behavior policy, once at the start of the step",
        ),
        "m2po": MaskMethod(
            source="M2PO, as in AReaL",
            options=M2poOptions,
            needs="old_logprobs",
            whole_batch=True,
            deviation="over the whole batch; threshold from memory",
        ),
        "mastered": MaskMethod(
            source="UloRL, arXiv 2507.19766",
            options=MasteredOptions,
            needs="policy",
            deviation="probability and entropy at the start of the step",
        ),
    }
)


def reads_whole_batch(name: str) -> bool:
    """Tell whether a mask decides from the whole batch; ``module:function`` may."""
    method = MASK_METHODS.get(name)
    return method is None or method.whole_batch


OWN_MASK = "own"
"""Name of every mask of a user's code in metrics, whose labels must be few."""


class MaskConfig(Section):
    """One token mask."""

    name: str = Field(json_schema_extra={"examples": [*MASK_METHODS, "module:function"]})
    """Mask: icepop, ratio, opsm, m2po, mastered, or ``module:function`` of your code."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the mask."""

    @model_validator(mode="before")
    @classmethod
    def _a_name_alone_is_a_mask(cls, data: Any) -> Any:
        return {"name": data} if isinstance(data, str) else data

    @field_validator("name")
    @classmethod
    def _mask_is_known(cls, name: str) -> str:
        return check_name(name, MASK_METHODS)

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        complete_options(self.name, self.options, MASK_METHODS, "options")
        return self
