"""Environment of a class that has Gymnasium's ``reset`` and ``step``, in a thread of its own."""

import asyncio
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

from rollmesh.errors import ConfigError
from rollmesh.tasks.environments.environment_protocol import EnvironmentFailed, EnvironmentReply
from rollmesh.tasks.environments.turn_shape import (
    EpisodeTurns,
    TurnShape,
    UnreadableAction,
    as_text,
    check_choice,
    with_shape,
)
from rollmesh.tasks.verifiers.verifier_protocol import short_repr
from rollmesh.types import Prompt
from rollmesh.user_code import load_target

_FIELD = "rollout.environment_options.target"
RENDERED = "render()"


@with_shape
class GymnasiumEnvironment:
    """Episode of a Gymnasium environment, or of a class with the same ``reset`` and ``step``."""

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, Any] | None = None,
        action: Literal["text", "integer"] | Mapping[str, Any] = "text",
        replayable: bool = False,
        **shape: Any,
    ) -> None:
        """Create an episode.

        ``target`` is ``module:Class``, or ``gymnasium:ID`` of a registered environment, with its keyword ``arguments``.
        ``action`` is what a turn says: its ``text``, the last ``integer`` in it, or a mapping of words, of which the
        last one counts, to actions. ``observation`` may also be ``render()``. ``replayable`` says that equal seeds and
        actions give equal episodes: a lost worker's trajectory then continues.
        Raises ConfigError for options that do not fit.
        """
        if not isinstance(action, Mapping):
            check_choice("action", action, ("text", "integer"))
        self.replayable = replayable
        self._make = _maker(target, dict(arguments or {}))
        self._action, self._shape = action, TurnShape(**shape)
        self._turns = EpisodeTurns(self._shape)
        self._thread: OwnThread | None = None
        self._environment: Any = None

    async def reset(self, prompt: Prompt) -> EnvironmentReply:
        seed, options = self._shape.reset_of(prompt)
        self._thread = OwnThread("environment")

        def begin() -> str:
            self._environment = self._make()
            begun = self._environment.reset(seed=seed, options=options or None)
            with_info = isinstance(begun, tuple) and len(begun) == 2 and isinstance(begun[1], Mapping)
            return self._text(begun[0] if with_info else begun)

        return self._turns.first(await self._thread.call(begin), done=False)

    async def step(self, response_text: str, idempotency_key: str) -> EnvironmentReply:
        assert self._thread is not None
        try:
            return await self._thread.call(lambda: self._play(response_text))
        except UnreadableAction as error:
            return self._turns.unread(error)

    async def aclose(self) -> None:
        """Close the environment after its last call, and do not wait for one that hangs."""
        if self._thread is not None:
            self._thread.end(self._close)

    def _close(self) -> None:
        close = getattr(self._environment, "close", None)
        if close is not None:
            close()

    def _play(self, turn: str) -> EnvironmentReply:
        action = self._read(self._shape.action_text(turn))
        space = getattr(self._environment, "action_space", None)
        if space is not None and not space.contains(action):
            raise UnreadableAction(f"{action!r} is not in {space}")
        played = self._environment.step(action)
        # Five since Gym 0.26: terminated, truncated; four before: done.
        if not isinstance(played, tuple) or len(played) not in (4, 5):
            raise EnvironmentFailed(
                f"environment: step returned {short_repr(played)}, expected (observation, reward, terminated, "
                "truncated, info)"
            )
        observation, reward, *ended, _info = played
        return self._turns.reply(self._text(observation), reward, any(map(bool, ended)))

    def _read(self, text: str) -> Any:
        """Return the action in a text. Raises UnreadableAction."""
        if self._action == "text":
            return text
        if isinstance(self._action, Mapping):
            words = {str(word).casefold(): action for word, action in self._action.items()}
            pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
            found = re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", text.casefold())
            if not found:
                raise UnreadableAction(f"no action in the turn; actions are {', '.join(map(str, self._action))}")
            return words[found[-1]]
        numbers = re.findall(r"-?\d{1,18}", text)
        if not numbers:
            raise UnreadableAction("no whole number in the turn")
        return int(numbers[-1])

    def _text(self, observation: object) -> str:
        if self._shape.observation == RENDERED:
            return as_text(self._environment.render())
        return self._shape.observation_text(observation)


def _maker(target: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that makes the environment. Raises ConfigError for a target that does not exist."""
    module, _, name = target.partition(":")
    if module != "gymnasium":
        made: Callable[..., Any] = load_target(target, _FIELD)
        if not callable(made):
            raise ConfigError(f"{_FIELD}: {target} is not callable")
        return lambda: made(**arguments)
    make = load_target("gymnasium:make", _FIELD)
    spec = load_target("gymnasium:spec", _FIELD)
    try:
        spec(name)
    except Exception as error:  # gymnasium and what it imports have errors of their own
        raise ConfigError(f"{_FIELD}: {target}: {error}") from error
    return lambda: make(name, **arguments)


T = TypeVar("T")


class OwnThread:
    """Daemon thread: its object sees one thread, and a call that hangs holds up neither others nor the process."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(self, function: Callable[[], T]) -> T:
        """Return the result of a function."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        return await asyncio.wrap_future(future)

    def end(self, last: Callable[[], Any]) -> None:
        """End the thread after the calls so far and a last one, whose errors nobody needs."""
        self._calls.put((Future(), last))
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, function = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:
                # No future takes a StopIteration.
                future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
            except BaseException as error:  # an exit of the user's code ends its episode, not the process
                future.set_exception(RuntimeError(repr(error)))
