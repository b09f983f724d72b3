"""A model that calls tools: it knows one conversation by heart."""

import functools
import json
from pathlib import Path

import torch
from renderers import config_from_name, create_renderer
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...kit.chat_tokenizers import CHATML
from ...kit.family_tokenizers import write_family_tokenizer
from ...kit.models import tiny_qwen2

QUESTION = {"role": "user", "content": "what is 2 + 3?"}
# As an MCP server describes a function of two integers.
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "properties": {"a": {"title": "A", "type": "integer"}, "b": {"title": "B", "type": "integer"}},
            "required": ["a", "b"],
            "title": "addArguments",
            "type": "object",
        },
    },
}
SAID = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
            for a, b in ((2, 3), (3, 2))
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "5"},
    {"role": "tool", "tool_call_id": "c", "content": "five"},
    {"role": "assistant", "reasoning_content": "both agree", "content": "It is 5."},
]


@functools.cache
def trained(folder: Path) -> Path:
    """A small model that has learnt one conversation by heart: two calls at once, their results, an answer."""
    torch.manual_seed(0)
    write_family_tokenizer(folder, "qwen3", CHATML, text=json.dumps([ADD, SAID, QUESTION]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    renderer = create_renderer(tokenizer, config_from_name("qwen3"))
    whole = renderer.render([QUESTION, *SAID], tools=[ADD])  # type: ignore[arg-type, list-item]
    ids, own = torch.tensor(whole.token_ids), torch.tensor(whole.sampled_mask)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 1024}
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = tiny_qwen2(vocab_size, eos_token_id=renderer.get_stop_token_ids(), **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(1000):
        logits = model(ids[None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits[own[1:]], ids[1:][own[1:]])
        if loss < 5e-3:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 5e-3, f"the conversation was not learnt: {loss}"
    with torch.no_grad():
        model.model.norm.weight.mul_(4.0)  # the same words, sampled as good as certainly
    model.save_pretrained(folder)
    return folder
