"""Teachers: frozen models that score the tokens of finished trajectories, and what the policy learns from them."""

from collections.abc import Collection, Iterator, Mapping
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
    """Time limit for the scores of a trajectory, its wait in the service included; after it ``on_error`` applies. A
    teacher of which no service is reached is waited for."""
    on_error: Literal["unscorable", "dead_letter"] = "unscorable"
    """Outcome of a trajectory that the teacher cannot score. unscorable: another answer replaces it in the group;
    dead_letter: like unscorable, and the trajectory is kept for inspection."""
    sglang: SglangConfig = Field(default_factory=SglangConfig)
    """SGLang server."""

    @model_validator(mode="after")
    def _it_has_weights(self) -> Self:
        if self.model is None and self.address is None:
            raise ValueError("model: set the folder of the teacher's model, or the address of its services")
        if self.engine == "sglang" and (reason := self.sglang.problem("device", self.device)):
            raise ValueError(f"device={self.device}: {reason}")
        return self

    @property
    def bytes_per_token(self) -> int:
        """Size of the scores of a token: a float32, and an int32 and a float32 of each most likely token."""
        return 4 + 8 * self.top_k


def teacher_of_domain(teachers: Mapping[str, TeacherConfig], domain: str) -> str | None:
    """Return the name of the teacher that scores the prompts of a domain; None for none."""
    general = None
    for name, teacher in teachers.items():
        if domain in teacher.domains:
            return name
        general = general if teacher.domains else name
    return general


def teacher_problems(teachers: Mapping[str, TeacherConfig], domains: Collection[str] | None) -> Iterator[str]:
    """Yield what keeps the prompts of these domains, None where only the rows name them, from having one teacher."""
    owners: dict[str, str] = {}
    for name, teacher in teachers.items():
        for domain in teacher.domains or ("",):
            if (other := owners.setdefault(domain, name)) != name:
                scope = f"domain {domain}" if domain else "the prompts of no other teacher"
                yield f"teachers.{name}.domains: {scope} is of teachers.{other}; give every teacher domains of its own"
    if domains is None or not teachers:
        return
    for domain in sorted(owners.keys() - {"", *domains}):
        known = f"its domains are {', '.join(domains)}" if any(domains) else "its prompts have none"
        yield f"teachers.{owners[domain]}.domains: data has no domain {domain}; {known}"
    if "" not in owners and (missing := [domain for domain in domains if domain not in owners]):
        yield (
            f"teachers: none has the prompts of {f'domain {missing[0]}' if missing[0] else 'no domain'}; name it in "
            "the domains of one, or leave out the domains of one"
        )


class TeacherObjective(Section):
    """Objective of the policy from the scores of the teachers (docs/methods.md: Teachers)."""

    reverse_kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of log pi_teacher - log pi_behaviour of a token in its advantage; 0 is off."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """Discount per token of the policy at which a token has those of the later tokens too; 0 for its own only."""
    forward_kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight in the loss of KL(teacher || policy) over the teacher's ``top_k`` tokens and all others together; 0 is
    off."""
    with_reward: bool = False
    """Learn from the advantage of the reward too; false leaves the reward to the reports."""

    @model_validator(mode="after")
    def _it_teaches_something(self) -> Self:
        if not self.reverse_kl_coefficient and not self.forward_kl_coefficient:
            raise ValueError(
                "reverse_kl_coefficient=0 and forward_kl_coefficient=0: the teachers would teach nothing; set one "
                "above 0"
            )
        if self.discount and not self.reverse_kl_coefficient:
            raise ValueError(f"discount={self.discount:g}: is of the reverse KL; leave it out")
        return self
