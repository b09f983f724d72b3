"""Teachers: frozen models that score the tokens of finished trajectories."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollmesh.config.generator import SglangConfig
from rollmesh.config.section import GrpcAddress, Section

TeacherName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


def teacher_service(name: str) -> str:
    """Return the name of a teacher's service: of its processes, logs and endpoint files."""
    return f"teacher-{name}"


class TeacherConfig(Section):
    """One teacher: a model folder, or the address of services that serve it."""

    model: str | None = None
    """Hugging Face folder with the policy's tokenizer; ``recipe:NAME`` is a model packaged with rollmesh. Services at
    ``address`` need none here."""
    domains: tuple[str, ...] = ()
    """Domains of the prompts that it scores; empty for those of no other teacher."""
    address: GrpcAddress | None = None
    """host:port of its services. Requests are balanced over every address of the name, so use a headless service; null
    finds the services in the run folder."""
    engine: Literal["torch", "sglang"] = "torch"
    """torch: the embedded engine; sglang: an SGLang server, see ``sglang``."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engine; auto uses CUDA when available."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of its weights."""
    replicas: int = Field(default=1, ge=0)
    """Teacher processes that the launcher starts."""
    top_k: int = Field(default=0, ge=0, le=1024)
    """Most likely tokens that it returns per response token, for ``forward_kl_coefficient``; 0 for none."""
    tokens_per_microbatch: int = Field(default=8192, ge=16)
    """Token budget of one forward pass (engine torch)."""
    timeout_seconds: float = Field(default=300.0, gt=0)
    """Time limit for the scores of a trajectory, with all retries."""
    on_error: Literal["unscorable", "dead_letter"] = "unscorable"
    """Outcome of a trajectory that the teacher cannot score. unscorable: another answer replaces it in the group;
    dead_letter: like unscorable, and the trajectory is kept for inspection."""
    sglang: SglangConfig = Field(default_factory=SglangConfig)
    """SGLang server."""

    @model_validator(mode="after")
    def _it_has_weights(self) -> Self:
        if self.model is None and self.address is None:
            raise ValueError("model: set the folder of the teacher's model, or the address of its services")
        return self
