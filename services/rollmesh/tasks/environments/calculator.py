"""A calculator as a tool: the one environment that rollmesh ships.

The policy writes ``<calc>12 * 7</calc>`` and gets ``<result>84</result>``; a turn without a call ends the episode,
and the verifier scores the whole response.
"""

from __future__ import annotations

from rollmesh.errors import ConfigError
from rollmesh.tasks.environments.arithmetic import ArithmeticRefused, evaluate, written
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply
from rollmesh.types import Prompt


class CalculatorEnvironment:
    """Evaluates the last closed ``<calc>...</calc>`` of each turn; stateless, so it is replayable and idempotent."""

    replayable = True

    def __init__(self, reply: str = "<result>{result}</result>", tag: str = "calc") -> None:
        """``reply``: the text around {result}, for example with the turn markers of a chat model; ``tag``: of a call.

        Raises ConfigError when the reply has no place for the result.
        """
        if "{result}" not in reply:
            raise ConfigError(f"rollout.environment_options.reply: {reply!r} has no {{result}} in it")
        if not tag.isidentifier():
            raise ConfigError(f"rollout.environment_options.tag: {tag!r} is not a plain word")
        self._reply = reply
        self._open, self._close = f"<{tag}>", f"</{tag}>"

    async def reset(self, prompt: Prompt) -> None:
        """Begin an episode: the calculator keeps nothing."""

    async def step(self, response_text: str, idempotency_key: str) -> EnvironmentReply:
        """The result of the turn's last call, or the reason why there is none, as text."""
        end = response_text.rfind(self._close)
        start = response_text.rfind(self._open, 0, end) if end >= 0 else -1
        if start < 0:
            return EnvironmentReply(text="", done=True)
        expression = response_text[start + len(self._open) : end]
        try:
            result = written(evaluate(expression))
        except ArithmeticRefused as refusal:
            result = f"error: {refusal}"
        return EnvironmentReply(text=self._reply.replace("{result}", result), done=False)

    async def aclose(self) -> None:
        """Nothing to give up."""
