"""Protocol of environments, one object per trajectory and called once per turn, and the environment of a run file."""

import inspect
import numbers
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rollmesh.characters import half_character
from rollmesh.errors import ConfigError, DataError, RollmeshError
from rollmesh.tasks.verifiers.verifier_protocol import short_repr
from rollmesh.types import LARGEST_REWARD, Prompt
from rollmesh.user_code import call_target, load_function, load_target

BUILT_IN: Mapping[str, str] = {
    "calculator": "rollmesh.tasks.environments.calculator:CalculatorEnvironment",
    "gymnasium": "rollmesh.tasks.environments.gymnasium_episode:GymnasiumEnvironment",
    "openenv": "rollmesh.tasks.environments.openenv:OpenEnvEnvironment",
}
"""Environments by their name in the run file, as ``module:Class``, imported when they are used."""
BUILT_IN_AGENTS: Mapping[str, str] = {"verifiers": "rollmesh.tasks.environments.verifiers_agent:VerifiersAgent"}
"""Agents by their name in the run file, as ``module:Class``, whose objects are agent functions."""


class EnvironmentFailed(RollmeshError, RuntimeError):
    """The environment raised an error or timed out: the attempt fails, but the trajectory can be retried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReply:
    """Reply of the environment to one turn of the policy, or what it says before the first."""

    text: str
    """Text appended to the context as environment tokens, never in the loss; may be empty."""
    done: bool
    """True if the episode is over."""
    reward: float | None = None
    """Reward of the episode so far, None for no change: the newest one counts, and with ``trainer.algorithm.credit:
    turn`` a turn has what it changed. The verifier scores an episode without any."""


def checked_reply(reply: object, method: str = "step") -> EnvironmentReply:
    """Return the result of ``step`` or ``reset``. Raises DataError for a result that is no valid reply."""
    if not isinstance(reply, EnvironmentReply):
        raise DataError(f"{method} returned {type(reply).__name__} instead of an EnvironmentReply")
    if not isinstance(reply.text, str):
        raise DataError(f"{method} returned the text {short_repr(reply.text)}, expected text")
    if problem := half_character(reply.text):
        raise DataError(f"{method} returned the text {short_repr(reply.text)}, in which {problem}")
    if not isinstance(reply.done, bool | np.bool_):
        raise DataError(f"{method} returned done={short_repr(reply.done)}, expected True or False")
    reward: object = reply.reward
    if isinstance(reward, int) and abs(reward) > LARGEST_REWARD:  # it may not fit into a float
        raise DataError(f"{method} returned the reward {short_repr(reward)}, expected at most {LARGEST_REWARD:g}")
    if not isinstance(reward, numbers.Real | np.bool_ | None):
        raise DataError(f"{method} returned the reward {short_repr(reply.reward)}, expected a number or None")
    return reply


def checked_snapshot(state: object) -> bytes:
    """Return the result of ``snapshot``. Raises DataError for a result that is no bytes."""
    if not isinstance(state, bytes):
        raise DataError(f"snapshot returned {type(state).__name__} instead of bytes")
    return state


class Environment(Protocol):
    """One episode.

    Calls are at-least-once: after a crash a turn can be sent again with the same ``idempotency_key``. An environment
    with external effects must not repeat them then. The key is ``<trajectory_id>:<turn>:<digest>``. The digest
    covers the policy's tokens up to the end of the turn and, in an evaluation, the policy version.
    """

    replayable: bool
    """True if the same turns, sent to a new environment, give the same state and the same replies. Otherwise the
    environment must be a SnapshotEnvironment, or the trajectory restarts after its worker is lost."""

    async def reset(self, prompt: Prompt) -> EnvironmentReply | None:
        """Begin the episode of a prompt; called once, before all other methods.

        A reply is what the policy reads after the prompt, before its first turn; its reward is that of an episode whose
        tokens run out in the first turn.
        """

    async def step(self, response_text: str, idempotency_key: str) -> EnvironmentReply:
        """Answer one turn of the policy, given as text without special tokens.

        No text of a policy is an error. An exception means that the environment failed.
        """

    async def aclose(self) -> None:
        """Release the resources of the episode; called once, after all other methods, also after an error."""


@runtime_checkable
class SnapshotEnvironment(Environment, Protocol):
    """Environment whose state can be saved with the partial trajectory."""

    def snapshot(self) -> bytes:
        """Return the state after the last completed step."""

    def restore(self, state: bytes) -> None:
        """Continue from a snapshot; called after ``reset``, instead of the turns that the snapshot covers."""


AgentFunction = Callable[[Any, Mapping[str, Any]], Awaitable[float | Mapping[str, Any]]]
"""Agent: ``async def rollout(client, row) -> reward``, with an OpenAI client and the session's JSON. The reward is a
number, or the body of POST /v1/sessions/ID/reward."""


def load_agent(target: str, options: Mapping[str, Any]) -> AgentFunction:
    """Return the agent that ``rollout.agent.function`` names, with ``rollout.agent.function_options`` as keywords.

    Raises ConfigError if it is neither built-in nor a coroutine function of a client, a row and the options.
    """
    field = "rollout.agent.function"
    if (built_in := BUILT_IN_AGENTS.get(target)) is not None:
        agent: AgentFunction = call_target(load_target(built_in, field), target, field, options, f"{field}_options")
        return agent
    if ":" not in target:
        raise ConfigError(f"{field}: {target!r} is not one of {', '.join(BUILT_IN_AGENTS)}, and not module:function")
    return partial(load_function(target, field, ("client", "row"), options, coroutine=True), **options)


def environment_factory(name: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """Return a function that creates a new environment for each trajectory: built-in, or ``module:Class``.

    One environment is created here to check the options. Raises ConfigError for an unknown name or wrong options.
    """
    if name not in BUILT_IN and ":" not in name:
        raise ConfigError(f"rollout.environment: {name!r} is not one of {', '.join(BUILT_IN)}, and not module:Class")
    make: Callable[..., Environment] = load_target(BUILT_IN.get(name, name), "rollout.environment")
    environment = call_target(make, name, "rollout.environment", options, "rollout.environment_options")
    missing = [m for m in ("reset", "step", "aclose") if not inspect.iscoroutinefunction(getattr(environment, m, None))]
    if missing or not isinstance(getattr(environment, "replayable", None), bool):
        raise ConfigError(
            f"rollout.environment: {name} needs async {', '.join(missing) or 'methods'} and an attribute replayable"
        )
    return lambda: make(**options)
