"""Calculator tool, the only built-in environment.

The policy writes ``<calc>12 * 7</calc>`` and receives ``<result>84</result>``. A turn without a call ends the episode,
and the verifier scores the whole response.
"""

from __future__ import annotations

from rollmesh.errors import ConfigError
from rollmesh.tasks.environments.arithmetic import ArithmeticRejected, evaluate, format_value
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply
from rollmesh.types import Prompt


class CalculatorEnvironment:
    """Evaluator of the last closed ``<calc>...</calc>`` of each turn; stateless, so replayable and idempotent."""

    replayable = True

    def __init__(self, reply: str = "<result>{result}</result>", tag: str = "calc") -> None:
        """Create a calculator.

        ``reply`` is the text around {result}, for example with the turn markers of a chat model; ``tag`` marks a call.
        Raises ConfigError if the reply does not contain {result}, or if the tag is not an identifier.
        """
        if "{result}" not in reply:
            raise ConfigError(f"rollout.environment_options.reply: {reply!r} must contain {{result}}")
        if not tag.isidentifier():
            raise ConfigError(f"rollout.environment_options.tag: {tag!r} must be an identifier")
        self._reply = reply
        self._open, self._close = f"<{tag}>", f"</{tag}>"

    async def reset(self, prompt: Prompt) -> None:
        """Do nothing: the calculator keeps no state."""

    async def step(self, response_text: str, idempotency_key: str) -> EnvironmentReply:
        """Return the result of the turn's last call, or the reason for its rejection, as text."""
        end = response_text.rfind(self._close)
        start = response_text.rfind(self._open, 0, end) if end >= 0 else -1
        if start < 0:
            return EnvironmentReply(text="", done=True)
        expression = response_text[start + len(self._open) : end]
        try:
            result = format_value(evaluate(expression))
        except ArithmeticRejected as error:
            result = f"error: {error}"
        return EnvironmentReply(text=self._reply.replace("{result}", result), done=False)

    async def aclose(self) -> None:
        """Do nothing: the calculator holds no resources."""
