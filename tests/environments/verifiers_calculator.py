"""Environment of verifiers with a calculator tool, in the loop of the sums. Imported there only."""

import itertools
import json
import re
from collections.abc import Iterator

import verifiers.v1 as vf
from verifiers_sums import OwnLoop, SumData

__all__ = ["Calculator", "CalculatorLoop"]

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATE = {"name": "calculate", "description": "Calculate.", "parameters": PARAMETERS}


class CalculatorTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(re.findall(r"-?\d+", trace.last_reply or "")[-1:] == [str(self.data.answer)])


class Calculator(vf.Taskset[CalculatorTask]):
    def load(self) -> Iterator[CalculatorTask]:
        tools = ({"type": "function", "function": CALCULATE},)
        for a, sign, b in itertools.product(range(2, 10), "+-*", range(2, 10)):
            expression = f"{a} {sign} {b}"
            data = SumData(prompt=f"What is {expression}?", answer=eval(expression), tools=tools)
            yield CalculatorTask(data, self.config.task)


class CalculatorLoop(OwnLoop):
    def use(self, arguments: str) -> str:
        expression = str(json.loads(arguments).get("expression"))
        return str(eval(expression)) if re.fullmatch(r"[2-9] [-+*] [2-9]", expression) else "unknown expression"
