"""Scalable services of a run and the bounds of their replicas."""

from rollmesh.config.run import RunConfig
from rollmesh.config.teachers import teacher_service
from rollmesh.errors import ConfigError

_SCALABLE = ("generator", "reward", "rollout")
"""Services beside the teachers that can be scaled while a run is in progress; the number of trainer ranks is fixed."""

MOST_REPLICAS = 256
"""Maximum replicas of one service, so that a typing error does not fill the machine with processes."""

_FEWEST = {"reward": 1, "rollout": 1}


def check_replicas(service: str, replicas: int) -> None:
    """Raise ConfigError for a service that cannot be scaled, or for a number out of its bounds."""
    if service == "trainer":
        raise ConfigError(
            "trainer cannot be scaled while a run is in progress, because the number of its ranks is fixed: stop the "
            "run, set launcher.trainer_processes, and start it again"
        )
    if service not in _SCALABLE and not service.startswith(teacher_service("")):
        known = ", ".join((*_SCALABLE, teacher_service("NAME")))
        raise ConfigError(f"{service} cannot be scaled: expected one of {known}")
    fewest = _FEWEST.get(service, 0)
    if not fewest <= replicas <= MOST_REPLICAS:
        raise ConfigError(f"{service}={replicas}: expected {fewest} to {MOST_REPLICAS} replicas")


def check_scale(config: RunConfig, service: str, replicas: int) -> None:
    """Raise ConfigError like ``check_replicas``, or when this run cannot have that number of replicas."""
    check_replicas(service, replicas)
    if service not in configured_replicas(config):
        raise ConfigError(f"{service} cannot be scaled: teachers of the run file has none of that name without address")
    reason = config.generator.engine_section.problem("replicas", replicas) if service == "generator" else ""
    if reason:
        raise ConfigError(f"generator={replicas}: {reason}")


def configured_replicas(config: RunConfig) -> dict[str, int]:
    """Return the replicas of every scalable service and every teacher in the run file."""
    return {
        "generator": config.generator.replicas,
        "reward": config.launcher.reward_replicas,
        "rollout": config.launcher.rollout_replicas,
        **{teacher_service(name): each.replicas for name, each in config.teachers.items() if each.address is None},
    }


def replica_field(config: RunConfig, service: str) -> str:
    """Return the field with the replicas of a service of ``configured_replicas``."""
    teachers = {teacher_service(name): f"teachers.{name}.replicas" for name in config.teachers}
    return {"generator": "generator.replicas", **teachers}.get(service, f"launcher.{service}_replicas")
