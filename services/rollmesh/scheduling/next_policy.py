"""Policy that a generator loads next, as a pure function of what it serves and what is announced."""

from dataclasses import dataclass
from typing import Self

from rollmesh.config import RunConfig
from rollmesh.types import PolicyRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadRules:
    """Rules of the run file for new versions."""

    every_versions: int = 1
    """k: a newer version is loaded once a multiple of k lies between it and the served one."""
    at_once: int | None = None
    """Generators that load a new version at the same time; None is no limit."""
    last_train_step: int | None = None
    """Train step of the run's last policy, which is loaded always; None if it is not known."""

    @classmethod
    def from_config(cls, config: RunConfig) -> Self:
        """Return the rules of a run file."""
        return cls(
            every_versions=config.generator.reload_every_versions,
            at_once=config.generator.reload_at_once,
            last_train_step=config.trainer.train_steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPolicy:
    """Policy to load."""

    record: PolicyRecord
    urgent: bool
    """True if the generator must not wait for its turn: it cannot do its work with the version that it serves."""


def next_policy(
    serving: PolicyRecord | None,
    newest: PolicyRecord | None,
    pinned: PolicyRecord | None,
    rules: ReloadRules,
    *,
    required_version: int = 0,
    in_rotation: bool = True,
) -> NextPolicy | None:
    """Return the policy to load next; None while the served one stays.

    A pinned policy is served whatever its version. Otherwise versions only increase: a newest version below the served
    one means that Redis has lost policies. ``required_version`` is the oldest version allowed without a pin
    (``PolicyOutlook``). A generator out of rotation loads the newest version, even the one it has, to return.
    """
    if pinned is not None:
        served = in_rotation and serving is not None and serving.policy_version == pinned.policy_version
        return None if served else NextPolicy(record=pinned, urgent=True)
    if newest is None:
        return None
    if serving is None:
        return NextPolicy(record=newest, urgent=True)
    behind = newest.policy_version - serving.policy_version
    if behind < 0 or (behind == 0 and in_rotation):
        return None
    if not in_rotation or serving.policy_version < required_version:
        return NextPolicy(record=newest, urgent=True)
    is_last = rules.last_train_step is not None and newest.train_step >= rules.last_train_step
    passed = newest.policy_version // rules.every_versions > serving.policy_version // rules.every_versions
    return NextPolicy(record=newest, urgent=False) if passed or is_last else None
