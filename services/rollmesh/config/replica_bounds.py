"""Which services of a run can be scaled while it runs, and to how many replicas."""

from __future__ import annotations

from rollmesh.config.run import RunConfig
from rollmesh.errors import ConfigError

SCALABLE = ("generator", "reward", "rollout")
"""Services whose replicas come and go at any time; the trainer's ranks are a gang of fixed size."""

MOST_REPLICAS = 256
"""Of one service: a slip of the finger shall not start processes until the machine is full."""

_FEWEST = {"generator": 0, "reward": 1, "rollout": 1}


def check_replicas(service: str, replicas: int) -> None:
    """Raise ConfigError for a service that cannot be scaled, or for a number that makes no sense for it."""
    if service == "trainer":
        raise ConfigError(
            "trainer cannot be scaled while a run goes on: its ranks are one gang; stop the run, set "
            "launcher.trainer_processes, and start it again"
        )
    if service not in SCALABLE:
        raise ConfigError(f"{service} is no service that can be scaled: expected one of {', '.join(SCALABLE)}")
    fewest = _FEWEST[service]
    if not fewest <= replicas <= MOST_REPLICAS:
        raise ConfigError(f"{service}={replicas}: expected {fewest} to {MOST_REPLICAS} replicas")


def check_scale(config: RunConfig, service: str, replicas: int) -> None:
    """Like ``check_replicas``, and whether this run can have so many."""
    check_replicas(service, replicas)
    url = config.generator.sglang.url
    if service == "generator" and replicas > 1 and config.generator.engine == "sglang" and url is not None:
        raise ConfigError(
            f"generator={replicas}: generators cannot share the server at generator.sglang.url={url}; each loads "
            "policies into its own"
        )


def configured_replicas(config: RunConfig) -> dict[str, int]:
    """Replicas of every scalable service as the run file has them."""
    return {
        "generator": config.generator.replicas,
        "reward": config.launcher.reward_replicas,
        "rollout": config.launcher.rollout_replicas,
    }
