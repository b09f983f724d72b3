"""Base class of the config sections."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

from rollmesh.types import LOWEST_TEMPERATURE

_LARGEST_FLOAT32 = 3.4e38


class Section(BaseModel):
    """A closed, frozen section of the run file.

    Unknown keys and numbers that are not finite are errors. The docstrings become the descriptions of the schema.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _a_number_fits_the_services(cls, value: Any) -> Any:
        if isinstance(value, float) and abs(value) > _LARGEST_FLOAT32:
            raise ValueError(f"expected at most {_LARGEST_FLOAT32} in size, the largest number of float32")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("expected a whole number of at most 64 bits")
        return value


def problems_of(error: ValidationError) -> str:
    """Return the first three problems, each with its field, in one line."""
    found = [(".".join(map(str, each["loc"])), each["msg"].removeprefix("Value error, ")) for each in error.errors()]
    return "; ".join(": ".join(filter(None, problem)) for problem in found[:3])


def one_error(expected: str) -> WrapValidator:
    """Return a validator of a union with one error for all of its types, which says what was ``expected``."""

    def checked(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise ValueError(f"expected {expected}") from None

    return WrapValidator(checked)


class EngineSection(Section):
    """Section of one engine in ``generator``, with the engine's rules for other fields; this base has no rules."""

    rollout_defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of fields in ``rollout`` with this engine."""

    def problem(self, field: str, value: Any) -> str:
        """Return the reason why the engine cannot work with a value of ``generator.FIELD``; empty if it can."""
        return ""


def greedy_or_resolvable(temperature: float) -> float:
    """Return the temperature; ValueError if it is above 0 and too low to sample at."""
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"expected 0 (greedy) or at least {LOWEST_TEMPERATURE}")
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(greedy_or_resolvable)]
"""Softmax temperature; 0 is greedy."""

GrpcAddress = Annotated[str, Field(pattern=r"^(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):[0-9]{1,5}$")]
"""host:port of gRPC services."""


def one_line(secret: str) -> str:
    """Return a secret without the line break at its end, which editors and ``echo`` add to a file."""
    return secret.rstrip("\r\n")


def _one_line_secret(secret: SecretStr | None) -> SecretStr | None:
    return None if secret is None else SecretStr(one_line(secret.get_secret_value()))


Secret = Annotated[SecretStr | None, AfterValidator(_one_line_secret)]
"""Password, token or key, without the line break at its end; null for none."""
