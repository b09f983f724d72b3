"""Parts that adapters share: actions read from turns, observations as text, rewards of an episode."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.errors import ConfigError, DataError
from rollmesh.tasks.environments.environment_protocol import EnvironmentFailed, EnvironmentReply
from rollmesh.tasks.verifiers.verifier_protocol import short_repr
from rollmesh.types import Prompt

_USUAL_FIELDS = ("text", "content", "message", "messages")
_OPTIONS = "rollout.environment_options"


class UnreadableAction(ValueError):
    """The turn has no action that the environment takes; the policy is told why, because no text of it is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnShape:
    """Options that the environments of other packages share."""

    first: str
    """Text before the first turn: ``{text}`` is the observation, ``{tools}`` the tools."""
    reply: str
    """Text after a turn: ``{text}`` is the observation."""
    observation: str
    """Field of the observation that is its text, with dots for inner fields; empty for the usual ones, else JSON."""
    tag: str
    """Name of the tag around an action; empty if the whole turn is the action."""
    reward: str
    """Reward of the episode: ``sum`` or ``last`` of the steps' rewards, or that of the ``verifier``."""
    ends_unread: bool
    """True if a turn without a readable action ends the episode."""

    def __post_init__(self) -> None:
        check_choice("reward", self.reward, ("sum", "last", "verifier"))
        for name, text in (("first", self.first), ("reply", self.reply)):
            if "{text}" not in text:
                raise ConfigError(f"{_OPTIONS}.{name}: {text!r} must contain {{text}}")
        if self.tag and not self.tag.isidentifier():
            raise ConfigError(f"{_OPTIONS}.tag: {self.tag!r} must be an identifier")

    def action_text(self, turn: str) -> str:
        """Return what the last closed tag of a turn contains, or the turn. Raises UnreadableAction without a tag."""
        if not self.tag:
            return turn.strip()
        close = f"</{self.tag}>"
        end = turn.rfind(close)
        start = turn.rfind(f"<{self.tag}>", 0, end) if end >= 0 else -1
        if start < 0:
            raise UnreadableAction(f"no <{self.tag}>...{close} in the turn")
        return turn[start + len(self.tag) + 2 : end].strip()

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


def seed_of(prompt: Prompt) -> int:
    """Return the field ``seed`` of a row, else a number by the prompt: all members of a group begin alike."""
    seed = prompt.metadata.get("seed")
    if isinstance(seed, int) and seed >= 0:
        return seed
    return int.from_bytes(hashlib.blake2b(prompt.prompt_id.encode(), digest_size=4).digest(), "big") >> 1


def fields_of(prompt: Prompt, names: Sequence[str]) -> dict[str, Any]:
    """Return fields of a row. Raises DataError if one is missing."""
    if missing := [name for name in names if name not in prompt.metadata]:
        raise DataError(
            f"{_OPTIONS}.reset_fields: {prompt.prompt_id} has no {', '.join(missing)}, but "
            f"{', '.join(prompt.metadata) or 'no fields'}"
        )
    return {name: prompt.metadata[name] for name in names}


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
