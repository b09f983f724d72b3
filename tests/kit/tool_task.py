"""A task for agents with a calculator tool, and a small model that knows the tool and calls it half of the time."""

import itertools
import json
import operator
import random
import re
from pathlib import Path
from typing import Any

import torch
from renderers import config_from_name, create_renderer
from transformers import AutoTokenizer, Qwen2ForCausalLM

from .chat_tokenizers import CHATML
from .family_tokenizers import write_family_tokenizer
from .models import tiny_qwen2

SEED = 30
STEPS, BATCH, RATE = 300, 24, 1e-2
CALLS_SHARE = 0.5
"""Share of the demonstrations that call the tool; the others answer without a number."""
FIXED_ROWS = 32
"""Tasks that measure the accuracy of a policy, and are in no data set."""
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


Demonstration = tuple[list[int], list[bool]]
"""Token ids of a conversation, and which of them are the model's own."""


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    """The calculator as a tool."""
    return {
        "type": "function",
        "function": {"name": "calculate", "description": "Calculate.", "parameters": parameters},
    }


CALCULATE = tool({"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]})
"""The tool as one writes it by hand; frameworks make the same of a function, or that with titles."""
TITLED = tool(
    {
        "properties": {"expression": {"title": "Expression", "type": "string"}},
        "required": ["expression"],
        "title": "calculate_args",
        "type": "object",
        "additionalProperties": False,
    }
)


def tool_tasks() -> list[tuple[str, str]]:
    """Every expression with its value once, in mixed order."""
    digits = range(2, 10)
    found = [
        (f"{a} {sign} {b}", str(OPERATORS[sign](a, b))) for a, sign, b in itertools.product(digits, OPERATORS, digits)
    ]
    random.Random(SEED).shuffle(found)
    return found


def question(expression: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is {expression}?"}


def write_tasks(file: Path) -> Path:
    """Write the rows of a run, a chat prompt and its answer each; the last ``FIXED_ROWS`` tasks are not among them."""
    rows = ({"prompt": [question(expression)], "answer": value} for expression, value in tool_tasks()[:-FIXED_ROWS])
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def write_tool_model(folder: Path) -> Path:
    """Train a small model on demonstrations, in some 12 seconds of one core, and write it with its tokenizer."""
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    write_family_tokenizer(folder, "qwen3")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "".join(str(tokenizer.decode(ids)) for ids, _ in demonstrations(folder, TITLED, 8, rng))
    write_family_tokenizer(folder, "qwen3", CHATML, text=re.sub(r"\d", "", text))
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    for token in described["added_tokens"]:  # as in the family's tokenizers, where these are text of an answer
        token["special"] &= "tool_" not in token["content"]
    file.write_text(json.dumps(described))
    model = untrained(folder)
    pools = [demonstrations(folder, each, 400, rng) for each in (CALCULATE, TITLED)]
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    optimizers = (
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE / 2, betas=(0.9, 0.95), weight_decay=0.0),
    )
    rates = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: min((step + 1) / 20, 1.0) * (1 - step / STEPS))
        for o in optimizers
    ]
    for step in range(STEPS):
        loss(model, rng.sample(pools[step % len(pools)], BATCH)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
    model.save_pretrained(folder)
    return folder


def demonstrations(folder: Path, calculator: dict[str, Any], count: int, rng: random.Random) -> list[Demonstration]:
    """Conversations about random tasks, as the renderer writes them."""
    renderer = create_renderer(AutoTokenizer.from_pretrained(folder), config_from_name("qwen3"))
    tasks, found = tool_tasks(), []
    for _ in range(count):
        expression, value = rng.choice(tasks)
        said: list[Any] = [question(expression)]
        if rng.random() < CALLS_SHARE:
            function = {"name": "calculate", "arguments": {"expression": expression}}
            calls = [{"id": "c", "type": "function", "function": function}]
            said.append({"role": "assistant", "content": "", "tool_calls": calls})
            said.append({"role": "tool", "tool_call_id": "c", "content": value})
            said.append({"role": "assistant", "content": f"It is {value}."})
        else:
            said.append({"role": "assistant", "content": "It is hard to say."})
        whole = renderer.render(said, tools=[calculator])
        found.append((list(whole.token_ids), list(whole.sampled_mask)))
    return found


def untrained(folder: Path) -> Qwen2ForCausalLM:
    described = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.08, "max_position_embeddings": 1024}
    config = tiny_qwen2(described["vocab_size"], eos_token_id=described["eos_token_id"], dtype="float32", **sizes)
    return Qwen2ForCausalLM(config)


def loss(model: Qwen2ForCausalLM, batch: list[Demonstration]) -> torch.Tensor:
    """Mean cross-entropy of the model's own tokens; the common beginning of the conversations is computed once."""
    common = next(at for at, ids in enumerate(zip(*(ids for ids, _ in batch), strict=False)) if len(set(ids)) > 1)
    width = max(len(ids) for ids, _ in batch) - common
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    own = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, (tokens, sampled) in enumerate(batch):
        ids[row, : len(tokens) - common] = torch.tensor(tokens[common:])
        own[row, : len(tokens) - common] = torch.tensor(sampled[common:])
    cache = model.model(torch.tensor([batch[0][0][:common]]), use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(batch))
    hidden = model.model(ids, past_key_values=cache).last_hidden_state
    logits = model.lm_head(hidden[:, :-1][own[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][own[:, 1:]])
