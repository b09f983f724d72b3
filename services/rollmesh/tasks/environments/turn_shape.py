"""Parts that adapters share: actions read from turns, observations as text, rewards of an episode."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from typing import Any, Literal, TypeVar

from rollmesh.errors import ConfigError, DataError
from rollmesh.tasks.environments.environment_protocol import EnvironmentFailed, EnvironmentReply
from rollmesh.tasks.verifiers.extraction import last_tag
from rollmesh.tasks.verifiers.verifier_protocol import short_repr
from rollmesh.types import Prompt

_USUAL_FIELDS = ("text", "content", "message", "messages")
_OPTIONS = "rollout.environment_options"
C = TypeVar("C")


class UnreadableAction(ValueError):
    """The turn has no action that the environment takes; the policy is told why, because no text of it is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnShape:
    """Options of every environment of another package.

    ``first`` is the text before the first turn, ``reply`` that after a turn, around the observation's {text}; {tools}
    in ``first`` are the tools. ``observation`` names the field of the observation that the policy reads (dots for
    inner fields; else text, content, message or messages, else JSON). ``reset_fields`` of the row are arguments of the
    reset, beside ``seed``. ``reward`` is the sum of the steps, the last, or the verifier's. ``tag`` names the tag
    around an action; without one the whole turn is the action. ``ends_unread`` ends an episode at an action that cannot
    be read or taken, which is answered with the reason otherwise.
    """

    first: str = "{text}"
    reply: str = "{text}"
    observation: str = ""
    reset_fields: Sequence[str] = ()
    reward: Literal["sum", "last", "verifier"] = "sum"
    tag: str = ""
    ends_unread: bool = False

    def __post_init__(self) -> None:
        check_choice("reward", self.reward, ("sum", "last", "verifier"))
        for name, text in (("first", self.first), ("reply", self.reply)):
            if "{text}" not in text:
                raise ConfigError(f"{_OPTIONS}.{name}: {text!r} must contain {{text}}")
        if self.tag and not self.tag.isidentifier():
            raise ConfigError(f"{_OPTIONS}.tag: {self.tag!r} must be an identifier")

    def action_text(self, turn: str) -> str:
        """Return what the last closed tag of a turn contains, or the turn. Raises UnreadableAction without a tag."""
        action = last_tag(turn, self.tag) if self.tag else turn.strip()
        if action is None:
            raise UnreadableAction(f"no <{self.tag}>...</{self.tag}> in the turn")
        return action

    def reset_of(self, prompt: Prompt) -> tuple[int, dict[str, Any]]:
        """Return the seed of a prompt's reset and the ``reset_fields`` of its row. Raises DataError if one is missing.

        The seed is the row's field ``seed``, else a number by the prompt: all members of a group begin alike.
        """
        row = prompt.metadata
        if missing := [name for name in self.reset_fields if name not in row]:
            raise DataError(
                f"{_OPTIONS}.reset_fields: {prompt.prompt_id} has no {', '.join(missing)}, but "
                f"{', '.join(row) or 'no fields'}"
            )
        seed = row.get("seed")
        if not isinstance(seed, int) or seed < 0:
            seed = int.from_bytes(hashlib.blake2b(prompt.prompt_id.encode(), digest_size=4).digest(), "big") >> 1
        return seed, {name: row[name] for name in self.reset_fields}

    def observation_text(self, observation: object) -> str:
        """Return the text of an observation. Raises EnvironmentFailed if it lacks the field of the option."""
        if self.observation:
            for name in self.observation.split("."):
                if not isinstance(observation, Mapping) or name not in observation:
                    fields = ", ".join(map(str, observation)) if isinstance(observation, Mapping) else "no fields"
                    raise EnvironmentFailed(
                        f"{_OPTIONS}.observation={self.observation}: the observation has no {name!r}, but {fields}"
                    )
                observation = observation[name]
        elif isinstance(observation, Mapping):
            observation = next((observation[name] for name in _USUAL_FIELDS if observation.get(name)), observation)
        return as_text(observation)


class EpisodeTurns:
    """Replies of one episode, with the reward so far."""

    def __init__(self, shape: TurnShape) -> None:
        self._shape = shape
        self._reward: float | None = None if shape.reward == "verifier" else 0.0

    def first(self, text: str, done: bool, tools: str = "") -> EnvironmentReply:
        """Return what the policy reads before its first turn."""
        values = {"text": text, "tools": tools}
        written = re.sub(r"\{(text|tools)\}", lambda found: values[found[1]], self._shape.first)
        return EnvironmentReply(text=written, done=done, reward=self._reward)

    def reply(self, text: str, reward: object, done: bool) -> EnvironmentReply:
        """Return the reply to a turn; the environment gave ``reward`` for it, or None."""
        if reward is not None and self._reward is not None:
            try:
                given = float(reward)  # type: ignore[arg-type]
            except (TypeError, ValueError, OverflowError) as error:
                raise EnvironmentFailed(f"environment: the reward is {short_repr(reward)}, not a number") from error
            self._reward = given + (self._reward if self._shape.reward == "sum" else 0.0)
        return EnvironmentReply(text=self._shape.reply.replace("{text}", text), done=done, reward=self._reward)

    def unread(self, error: UnreadableAction) -> EnvironmentReply:
        """Return the reply to a turn without a readable action."""
        return self.reply(f"error: {error}", None, self._shape.ends_unread)


def as_text(value: object) -> str:
    """Return text as it is, messages as their contents in lines, and anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value:
        contents = [each.get("content") if isinstance(each, Mapping) else None for each in value]
        if all(isinstance(content, str) for content in contents):
            return "\n".join(map(str, contents))
    return json.dumps(_plain(value), ensure_ascii=False)


def json_action(text: str) -> dict[str, Any]:
    """Return the JSON object of an action, which may have words around it. Raises UnreadableAction."""
    start, end = text.find("{"), text.rfind("}")
    try:
        found = json.loads(text[start : end + 1]) if 0 <= start < end else None
    except (ValueError, RecursionError) as error:
        raise UnreadableAction(f"the action is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UnreadableAction("the action is not a JSON object")
    return found


def with_shape(made: type[C]) -> type[C]:
    """Give a class whose constructor hands ``**shape`` to a TurnShape the signature of both."""
    own = [p for p in signature(made).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    names = {parameter.name for parameter in own}
    shared = [p for p in signature(TurnShape).parameters.values() if p.name not in names]
    made.__signature__ = Signature([*own, *shared])  # type: ignore[attr-defined]  # what ``signature`` reads
    return made


def check_choice(name: str, value: object, known: Sequence[object]) -> None:
    """Raise ConfigError for an option that is none of its values."""
    if value not in known:
        raise ConfigError(f"{_OPTIONS}.{name}: {value!r} is none of {', '.join(map(str, known))}")


def _plain(value: object) -> object:
    """Return a value as JSON: keys as text, numpy's numbers and arrays as Python's, anything else as its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if callable(to_list := getattr(value, "tolist", None)):
        return _plain(to_list())
    return value if isinstance(value, str | int | float | None) else str(value)
