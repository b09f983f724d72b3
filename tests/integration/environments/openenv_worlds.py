"""Environments of OpenEnv's own base classes, served; runs on the python of that package.

python openenv_worlds.py FOLDER PORT      FOLDER has the environment that `openenv init` wrote, served below /echo
"""

import re
import socket
import sys
import time

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Answer(Action):
    message: str


class Seen(Observation):
    text: str = ""


class Hunt(Environment):
    """Guess a number of two digits; a guess costs 0.25, a hit pays 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.number = 0

    def reset(self, seed=None, episode_id=None, low=10, **kwargs):
        self.number = low + seed % (100 - low)
        return Seen(text=f"Guess a number from {low} to 99.")

    def step(self, action, timeout_s=None, **kwargs):
        if action.message == "sleep":
            time.sleep(3600)
        guess = int(action.message)  # anything else is an error of the environment
        hit = guess == self.number
        text = "hit" if hit else "higher" if guess < self.number else "lower"
        return Seen(text=text, reward=1.0 if hit else -0.25, done=hit)

    @property
    def state(self):
        return State()


class Claims(Environment):
    """Two turns; each pays a half if it claims a solution by an exclamation mark."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.turns = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Seen(text=" : ")

    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        return Seen(text=" : ", reward=0.5 * ("!" in action.message), done=self.turns == 2)

    @property
    def state(self):
        return State()


class Sums(MCPEnvironment):
    """Add by a tool; the sum is submitted by a tool, or said."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("sums")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @server.tool
        def submit(total: int) -> str:
            """Submit the sum."""
            return "thanks"

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.numbers = seed // 100, seed % 100
        return Seen(text=f"Add {self.numbers[0]} and {self.numbers[1]}.")

    async def step_async(self, action, timeout_s=None, **kwargs):
        seen = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction) and action.tool_name == "submit":
            seen.done, seen.reward = True, float(action.arguments.get("total") == sum(self.numbers))
        return seen

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Seen(text="ended", done=True, reward=float(action.message == str(sum(self.numbers))))

    @property
    def state(self):
        return State()


class Calculator(MCPEnvironment):
    """Answer a question by a tool that calculates; the message that says the number last is paid."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("calculator")

        @server.tool
        def calculate(expression: str) -> str:
            """Calculate."""
            return str(eval(expression)) if re.fullmatch(r"[2-9] [-+*] [2-9]", expression) else "unknown expression"

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.expression = f"{2 + seed % 8} {'+-*'[seed // 8 % 3]} {2 + seed // 24 % 8}"
        return Seen(text=f"What is {self.expression}?")

    def _step_impl(self, action, timeout_s=None, **kwargs):
        right = re.findall(r"-?\d+", action.message)[-1:] == [str(eval(self.expression))]
        return Seen(text="ended", done=True, reward=float(right))

    @property
    def state(self):
        return State()


def main():
    sys.path.insert(0, sys.argv[1])
    from server.app import app as echo  # one session at a time, as it was written

    served = FastAPI()
    served.mount("/hunt", create_app(Hunt, Answer, Seen, max_concurrent_envs=64))
    served.mount("/claims", create_app(Claims, Answer, Seen, max_concurrent_envs=64))
    served.mount("/sums", create_app(Sums, CallToolAction, CallToolObservation, max_concurrent_envs=64))
    served.mount("/desk", create_app(Sums, Answer, Seen, max_concurrent_envs=64))
    served.mount("/calculator", create_app(Calculator, Answer, Seen, max_concurrent_envs=64))
    served.mount("/echo", echo)
    listening = socket.create_server(("127.0.0.1", int(sys.argv[2])))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(served, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    main()
