"""Losses and token masks that a run file names."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from rollmesh.config.methods import Method, Point
from rollmesh.config.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMethod(Method):
    """One loss."""

    bounds: tuple[float, float] | None = None
    """Defaults of ``clip_low`` and ``clip_high``; None for a loss without bounds."""
    clips_ratio: bool = False
    """A token whose ratio is beyond the bounds has no gradient."""
    has_dual_clip: bool = False
    aggregation: str = "token_mean"
    """Aggregation unless the run file names one."""
    corrects_behavior: bool = False
    """Weights by pi_old over the behavior policy, so it needs a trainer-side pi_old."""
    pulls_without_advantage: bool = False
    """Has a gradient where the advantage is 0."""


class KimiOptions(Section):
    """Options of kimi."""

    tau: float = Field(default=0.1, gt=0)
    """Weight of the squared log-ratio."""


_RECOMPUTE = {"trainer.algorithm.old_logprobs": "recompute"}
_NO_BOUNDS = {"trainer.algorithm.clip_low": None, "trainer.algorithm.clip_high": None}

LOSSES = Point(
    field="trainer.algorithm.loss",
    module="rollmesh.algorithms.losses",
    inputs=("LossInput", "LossOptions"),
    own=LossMethod("your code", bounds=(0.2, 0.28), has_dual_clip=True, pulls_without_advantage=True),
    methods={
        "ppo_clip": LossMethod(
            "PPO, arXiv 1707.06347; bounds of DAPO, arXiv 2503.14476; dual clip, arXiv 1912.09729",
            bounds=(0.2, 0.28),
            clips_ratio=True,
            has_dual_clip=True,
        ),
        "decoupled_ppo": LossMethod(
            "arXiv 2110.00641; AReaL Eq. 5, arXiv 2505.24298",
            bounds=(0.2, 0.28),
            clips_ratio=True,
            has_dual_clip=True,
            corrects_behavior=True,
            example=_RECOMPUTE,
        ),
        "tis": LossMethod(
            "slime, verl",
            bounds=(0.2, 0.28),
            clips_ratio=True,
            has_dual_clip=True,
            corrects_behavior=True,
            example=_RECOMPUTE,
        ),
        "gspo": LossMethod(
            "GSPO, arXiv 2507.18071",
            bounds=(3e-4, 4e-4),
            clips_ratio=True,
            aggregation="sequence_mean_token_mean",
            deviation="a masked token counts as a ratio of 1; bounds as usually quoted, not checked against the paper",
            example={"trainer.algorithm.aggregation": None, **_NO_BOUNDS},
        ),
        "cispo": LossMethod("MiniMax-M1, arXiv 2506.13585", bounds=(1.0, 4.0), example=_NO_BOUNDS),
        "minpro": LossMethod(
            "MinPRO, arXiv 2601.22718",
            bounds=(0.2, 0.28),
            deviation="a masked token counts as a ratio of 1; bounds of DAPO, because the source's are not known",
        ),
        "topr": LossMethod(
            "TOPR, arXiv 2503.14286", deviation="one ratio per token instead of one per answer", example=_NO_BOUNDS
        ),
        "kimi": LossMethod(
            "Kimi k1.5, arXiv 2501.12599",
            options=KimiOptions,
            pulls_without_advantage=True,
            deviation="per token, as in ROLL; the optimizer keeps its moments between steps",
            example=_NO_BOUNDS,
        ),
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskMethod(Method):
    """One token mask."""

    needs: Literal["old_logprobs", "policy", "nothing"]
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
    """Bounds of the product over an answer; [0.5, 2] in verl's preset."""
    geometric: Bounds | None = None
    """Bounds of the geometric mean over an answer; [0.999, 1.001] in verl's preset."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """An answer with a token ratio below it is masked; 1e-4 in verl's preset."""

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


def _masked(name: str, **options: Any) -> dict[str, Any]:
    """Return the field that sets a mask with options of a short run: with the defaults some would mask nothing."""
    return {"trainer.algorithm.masks": [{"name": name, "options": options} if options else name]}


OWN_MASK = "own"
"""Name of every mask of a user's code in metrics, whose labels must be few."""

MASKS = Point(
    field="trainer.algorithm.masks",
    module="rollmesh.algorithms.token_masks",
    inputs=("MaskInput",),
    own=MaskMethod("your code", needs="nothing", whole_batch=True),
    methods={
        "icepop": MaskMethod(
            "IcePop, as in verl",
            options=IcepopOptions,
            needs="old_logprobs",
            deviation="the mask only; loss tis or decoupled_ppo adds the weight",
            example=_masked("icepop") | _RECOMPUTE,
        ),
        "ratio": MaskMethod(
            "rejection sampling of verl",
            function="ratio_bounds",
            options=RatioOptions,
            needs="old_logprobs",
            example=_masked("ratio", token=[0.5, 2.0], veto=1e-4) | _RECOMPUTE,
        ),
        "opsm": MaskMethod(
            "slime",
            options=OpsmOptions,
            needs="old_logprobs",
            deviation="against the behavior policy, once at the start of the step",
            example=_masked("opsm") | _RECOMPUTE,
        ),
        "m2po": MaskMethod(
            "M2PO, as in AReaL",
            options=M2poOptions,
            needs="old_logprobs",
            whole_batch=True,
            deviation="over the whole batch; threshold from memory",
            example=_masked("m2po", threshold=1e-4) | _RECOMPUTE,
        ),
        "mastered": MaskMethod(
            "DMMPT of UloRL, arXiv 2507.19766",
            options=MasteredOptions,
            needs="policy",
            deviation="probability and entropy at the start of the step",
            example=_masked("mastered", entropy=0.5, probability=0.9),
        ),
    },
)


class MaskConfig(Section):
    """One token mask."""

    name: str = Field(
        json_schema_extra={"examples": [*MASKS.methods, "module:function"]},
        description=f"Mask: {', '.join(MASKS.methods)}, or ``module:function`` of your code.",
    )
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the mask."""

    @model_validator(mode="before")
    @classmethod
    def _a_name_alone_is_a_mask(cls, data: Any) -> Any:
        return {"name": data} if isinstance(data, str) else data

    @field_validator("name")
    @classmethod
    def _mask_is_known(cls, name: str) -> str:
        return MASKS.check_name(name)

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        MASKS.complete_options(self.name, self.options, "options")
        return self
