"""Faults of the chaos bench: one table with the name, the cost and the required end of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

from rollmesh.config.teachers import teacher_service
from rollmesh.errors import ConfigError
from rollmesh.scheduling.presets import PRESETS

from .attack import AttackedRun
from .injections import (
    damage_last_step,
    damage_policy,
    damage_replay,
    damage_state,
    fill_redis,
    kill_environment,
    kill_leader,
    kill_redis,
    kill_service,
    kill_trainer_after,
    lose_policies,
    stall_redis,
    stall_service,
)
from .short_run import SESSION_TTL_SECONDS, TRAIN_STEPS

TEACHER = "wise"


class Cost(Enum):
    """Sampled tokens that a fault may waste on each rollout of its victim; a fault of Redis affects all rollouts."""

    NOTHING = "nothing"
    UNSAVED = "partial_save_tokens"
    """Unsaved tokens."""
    UNBOUNDED = "unbounded"
    """Tokens that Redis loses after it stored them, so that whole rollouts without a lease may be sampled again; or
    unsaved tokens of members that a schedule cuts off; or sampled tokens that the queue counts together with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedEnd:
    """Required end of a run after a fault."""

    exit_statuses: tuple[int, ...] = (0,)
    """Exit status of ``rollmesh up``; if ``green`` is false, also that of ``rollmesh audit``."""
    green: bool = True
    """True if the audit must be green, and the outside judge must find no problem."""
    output_contains: str = ""
    """Required text in the console's output."""


class Outside(Enum):
    """Process outside of the mesh that takes part in the rollouts; the small model of both calls a calculator tool."""

    NOTHING = "nothing"
    AGENT = "agent"
    """Agent that makes the rollouts by calls of the agents service."""
    ENVIRONMENT = "environment"
    """OpenEnv server that answers the turns."""


_GREEN = ExpectedEnd()
_REPAIRED = ExpectedEnd(output_contains="append-only file of the embedded Redis was damaged")
_ENDS_WITH_ERROR = ExpectedEnd(
    exit_statuses=(2, 1), green=False, output_contains="trainer-0 cannot continue: CheckpointError: "
)


@dataclass(frozen=True, slots=True)
class Fault:
    """Failure that the bench injects into a run."""

    name: str
    inject: Callable[[AttackedRun], None]
    """Inject the fault and block until it has ended; do nothing if the run ends first."""
    cost: Cost = Cost.UNSAVED
    expected_end: ExpectedEnd = _GREEN
    preset: str = "copris"
    """Schedule of the run."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fields of the run file, by section."""
    in_bucket: bool = False
    """True if the checkpoints of the run are in an object store."""
    outside: Outside = Outside.NOTHING
    """What takes part in the rollouts from outside of the mesh."""


def _under(preset: str, fault: Fault) -> Fault:
    """Return the fault in a run under another preset; spare members lose unsaved tokens without any fault."""
    cost = Cost.UNBOUNDED if PRESETS[preset].spare_member_share else fault.cost
    return replace(fault, name=f"{fault.name}, {preset}", preset=preset, cost=cost)


def _with_planner(fault: Fault) -> Fault:
    """Return the fault in a run whose hard prompts get a second round."""
    settings: Mapping[str, Mapping[str, Any]] = {
        "curriculum": {"planner": "dars"},
        "trainer": {"algorithm": {"advantage": "dr_grpo"}},
    }
    return replace(fault, name=f"{fault.name}, dars", settings=settings)


def _with_adapter(fault: Fault) -> Fault:
    """Return the fault in a run that trains an adapter."""
    settings: Mapping[str, Mapping[str, Any]] = {
        "model": {"adapter": {"rank": 8, "alpha": 16}},
        "trainer": {"learning_rate": 4e-3},
    }
    return replace(fault, name=f"{fault.name}, adapter", settings=settings)


def _with_teacher(fault: Fault) -> Fault:
    """Return the fault in a run that also learns from a teacher: the model that the run began with."""
    settings: Mapping[str, Mapping[str, Any]] = {
        "teachers": {TEACHER: {"model": "recipe:countdown", "top_k": 4}},
        "trainer": {"algorithm": {"teacher": {"reverse_kl_coefficient": 0.01, "with_reward": True}}},
    }
    return replace(fault, name=f"{fault.name}, taught", settings=settings)


def _with_deltas(fault: Fault) -> Fault:
    """Return the fault in a run whose policies are deltas in a bucket: updates so small keep most bits of a weight."""
    settings: Mapping[str, Mapping[str, Any]] = {
        "trainer": {"learning_rate": 3e-7},
        "checkpoints": {"anchor_every_versions": 4},
    }
    return replace(fault, name=f"{fault.name}, deltas", settings=settings, in_bucket=True)


def _with_outside(outside: Outside, fault: Fault) -> Fault:
    """Return the fault in a run with an agent or an environment, whose tokens hide how many sampled ones were lost."""
    settings: Mapping[str, Mapping[str, Any]] = {
        "rollout": {"max_new_tokens": 640, "max_attempts": 50},
        "trainer": {"learning_rate": 1e-3},
        "generator": {"max_context_tokens": 900},
    }
    name = f"{fault.name}, {outside.value}"
    return replace(fault, name=name, cost=Cost.UNBOUNDED, settings=settings, outside=outside)


def _kill_trainer(when: str, pattern: str) -> Fault:
    """Return a fault between two durable writes of the trainer."""
    return Fault(f"kill -9 trainer {when}", partial(kill_trainer_after, pattern=pattern), Cost.NOTHING)


def _kill_redis(consequence: str = "", end: ExpectedEnd = _GREEN, **options: Any) -> Fault:
    """Return a kill of Redis; there is no bound: with AOF everysec, a slow disk loses seconds of answered writes."""
    return Fault(f"kill -9 redis{consequence}", partial(kill_redis, **options), Cost.UNBOUNDED, end)


FAULTS: tuple[Fault, ...] = (
    _kill_trainer("between state and publication", "checkpoints/states/*/COMMITTED"),
    Fault("kill -9 generator", partial(kill_service, service="generator")),
    _kill_redis(", cut 4 KiB of its AOF", lost_bytes=4096),
    Fault("stall rollout 15 s", partial(stall_service, service="rollout", seconds=3 * SESSION_TTL_SECONDS)),
    _kill_trainer("between batch file and training", "checkpoints/batches/*.pb"),
    Fault("kill -9 leader", kill_leader),
    Fault("redis outage 60 s", partial(stall_redis, seconds=60.0)),
    _kill_trainer("while it saves its state", "checkpoints/states/*"),
    Fault("kill -9 rollout", partial(kill_service, service="rollout")),
    Fault("redis maxmemory reached 8 s, kill -9 trainer", partial(fill_redis, seconds=8.0)),
    _kill_trainer("while it publishes", "checkpoints/policies/*"),
    Fault("kill -9 reward", partial(kill_service, service="reward"), Cost.NOTHING),
    _kill_redis(", cut 64 KiB of its AOF", lost_bytes=65536),
    Fault("stall generator 10 s", partial(stall_service, service="generator", seconds=10.0)),
    _kill_trainer("between publication and announcement", "checkpoints/policies/*/manifest.json"),
    Fault("stall trainer 10 s", partial(stall_service, service="trainer", seconds=10.0), Cost.NOTHING),
    _kill_redis(", refused 40 s", away_seconds=40.0),
    Fault("kill -9 trainer", partial(kill_service, service="trainer"), Cost.NOTHING),
    Fault("stall reward 10 s", partial(stall_service, service="reward", seconds=10.0), Cost.NOTHING),
    _kill_redis(", cut 1024 KiB of its AOF", lost_bytes=1 << 20),
    Fault("flip a byte of a batch file, kill -9 trainer", damage_replay, Cost.NOTHING, _ENDS_WITH_ERROR),
    _kill_redis(", 4 KiB of zeros at the end of its AOF", _REPAIRED, zero_bytes=4096),
    Fault("flip a byte of the newest policy, kill -9 trainer", damage_policy),
    Fault(
        "flip COMMITTED, flip a byte of its batch file, last",
        partial(damage_last_step, train_step=TRAIN_STEPS),
        Cost.NOTHING,
        _ENDS_WITH_ERROR,
    ),
    Fault("flip a byte of the newest state, kill -9 trainer", damage_state, Cost.NOTHING),
    Fault(
        "delete the newest state, flip a byte of its batch file, after the end",
        partial(damage_last_step, train_step=TRAIN_STEPS, after_the_end=True),
        Cost.NOTHING,
        ExpectedEnd(exit_statuses=(0, 1), green=False),
    ),
    _under("sorted", Fault("kill -9 rollout", partial(kill_service, service="rollout"))),
    _under("rollpacker", Fault("kill -9 leader", kill_leader)),
    _under("flexmarl", _kill_trainer("between batch file and training", "checkpoints/batches/*.pb")),
    _under("kimi", Fault("kill -9 rollout", partial(kill_service, service="rollout"))),
    _under("roll", Fault("kill -9 generator", partial(kill_service, service="generator"))),
    _with_planner(Fault("kill -9 leader", kill_leader)),
    _with_adapter(_kill_trainer("while it publishes", "checkpoints/policies/*")),
    _with_adapter(Fault("kill -9 generator", partial(kill_service, service="generator"))),
    _with_adapter(_kill_trainer("between state and publication", "checkpoints/states/*/COMMITTED")),
    _with_teacher(Fault("kill -9 teacher", partial(kill_service, service=teacher_service(TEACHER)), Cost.NOTHING)),
    _with_teacher(Fault("kill -9 rollout", partial(kill_service, service="rollout"))),
    _with_teacher(_kill_trainer("between batch file and training", "checkpoints/batches/*.pb")),
    _with_teacher(_kill_redis(", cut 64 KiB of its AOF", lost_bytes=65536)),
    _with_deltas(_kill_trainer("while it uploads", "checkpoints/.deltas/*")),
    _with_deltas(Fault("delete the policies of the node, kill -9 generator", lose_policies)),
    _with_deltas(_kill_trainer("between state and publication", "checkpoints/states/*/COMMITTED")),
    _with_outside(Outside.AGENT, Fault("kill -9 agents", partial(kill_service, service="agents"))),
    _with_outside(Outside.AGENT, Fault("kill -9 generator", partial(kill_service, service="generator"))),
    _with_outside(Outside.ENVIRONMENT, Fault("kill -9 its server", kill_environment)),
)
"""Faults in the order of the rounds; ``make test`` runs the first four."""


def faults_named(name: str | None) -> Sequence[Fault]:
    """Return the fault of this name, or all faults for None. Raises ConfigError with the known names."""
    found = [fault for fault in FAULTS if name in (None, fault.name)]
    if not found:
        raise ConfigError(
            f"--fault {name!r}: unknown fault; choose one of: {'; '.join(fault.name for fault in FAULTS)}"
        )
    return found
