"""Every plug-in is called once before the services start; its error names the field, the file and the line."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rollmesh.errors import ConfigError, DataError, RollmeshError
from rollmesh.preflight.run_model import RunModel
from rollmesh.preflight.trial import try_inputs

from ...kit.run_files import made_run

PLUGINS = """
import torch
from rollmesh.algorithms.losses import TokenLoss
from rollmesh.curriculum.planners import Round
from rollmesh.curriculum.shapers import Closing
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply


def loss(data, options):
    return data.missing  # here: loss

def wrong_kinds(data, options):
    return options.logprobs - data.clip_low  # here: wrong_kinds

def columns(data, loss):
    none = torch.zeros_like(data.old_logprobs)
    return TokenLoss(loss=loss, ratio=none, weight=none, clip=none.to(torch.int8))

def no_gradient(data, options):
    return columns(data, torch.zeros_like(data.old_logprobs))

def surrogate(data, options):
    return columns(data, -(data.logprobs - data.old_logprobs).exp() * data.advantages)

class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("no way back")  # here: no_way_back

def no_way_back(data, options):
    return columns(data, Halved.apply(data.logprobs))

def advantage(data):
    return {}["rewards"]  # here: advantage

def with_policy(data):
    return data.policy_logprob_sums - data.rewards

with_policy.needs_policy = True

def mask(data):
    return data.entropy > 0  # here: mask

def keep_all(data):
    return data.mask & (data.policy_logprobs < 0) & (data.entropy > 0)

keep_all.needs_policy = True

def sampler(draw, prompts, history, train_step):
    return [0][draw.index]  # here: sampler

def first_row(draw, prompts, history, train_step):
    return int(history.groups.argmin())

class planner:
    def first(self, seen, group_size):
        return Round(needed=group_size, launched=group_size)

    def next(self, group):
        return group.members[0].reward  # here: planner

class one_more:
    def first(self, seen, group_size):
        return Round(needed=group_size, launched=group_size)

    def next(self, group):
        return Round(needed=len(group.members) + 1, launched=1)

def shaper(group, records):
    if records:
        raise RuntimeError("seen before")  # here: shaper
    return kept(group, records)

def kept(group, records):
    return Closing(shaped_rewards=tuple(member.shaped_reward for member in group.members))

def budget(train_step):
    return 100 // train_step  # here: budget

class Echo:
    replayable = True

    async def reset(self, prompt):
        self.prompt = prompt

    async def step(self, response_text, idempotency_key):
        return EnvironmentReply(text=response_text, done=True)

    async def aclose(self):
        pass

class environment(Echo):
    async def step(self, response_text, idempotency_key):
        return EnvironmentReply(text=response_text[0], done=True)  # here: environment

class unborn(Echo):
    def __init__(self):
        self.turns = int("none")  # here: unborn

def replies(reply):
    class Replies(Echo):
        async def step(self, response_text, idempotency_key):
            return reply

    return Replies

words = replies("a text")
half = replies(EnvironmentReply(text="hi " + chr(0xDC00), done=True))
nan_reward = replies(EnvironmentReply(text="", done=True, reward=float("nan")))
says_done = replies(EnvironmentReply(text="", done="no"))

class text_state(Echo):
    replayable = False

    def snapshot(self):
        return "a text"

    def restore(self, state):
        pass

class closed_file(Echo):
    async def reset(self, prompt):
        open("/", "w")  # here: closed_file

class leaves(Echo):
    async def reset(self, prompt):
        raise SystemExit("no simulator")  # here: leaves

class Later(Echo):
    async def reset(self, prompt):
        raise ConnectionRefusedError("the simulator starts later")

def rows():
    yield {"prompt": "1 2 5 > 7 :", "answer": "7"}
    raise LookupError("no more rows")  # here: rows

class lazy:
    def __len__(self):
        return 3

    def __getitem__(self, number):
        return [{"prompt": "1 2 5 > 7 :", "answer": "7"}][number]  # here: lazy

def verifier(response, metadata):
    return float(metadata["nope"])  # here: verifier

def says_whether(response, metadata):
    return response == metadata["answer"]

def fair(response, metadata):
    return 1.0
"""


@pytest.fixture(autouse=True)
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = tmp_path / "plugins_of_a_user.py"
    module.write_text(PLUGINS)
    rows = [f'{{"prompt": "1 2 {n} > 7 :", "answer": "7"}}\n' for n in range(3, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "plugins_of_a_user", raising=False)
    return module


def try_run(**changed: Any) -> list[str]:
    sections: dict[str, Any] = {
        "data": {"source": {"type": "jsonl", "path": "rows.jsonl"}, "max_prompt_tokens": 64},
        "reward": {"verifier": "exact"},
        "rollout": {"max_new_tokens": 64},
        "generator": {"max_context_tokens": 512},
    }
    return try_inputs(RunModel(made_run(**sections | changed)))


def own(name: str) -> str:
    return f"plugins_of_a_user:{name}"


def algorithm(**changed: Any) -> dict[str, Any]:
    return {"trainer": {"algorithm": changed}}


def masked(name: str) -> dict[str, Any]:
    return algorithm(masks=[own(name)], old_logprobs="recompute")


def curriculum(**changed: Any) -> dict[str, Any]:
    return {"curriculum": changed, **algorithm(advantage="dr_grpo")}


def environment(name: str) -> dict[str, Any]:
    return {"rollout": {"program": "environment", "environment": own(name), "max_new_tokens": 64}}


def source(name: str) -> dict[str, Any]:
    return {"data": {"source": {"type": "python", "target": own(name)}, "max_prompt_tokens": 64}}


def composite(name: str) -> dict[str, Any]:
    return {"reward": {"verifier": "composite", "options": {"parts": {"mine": {"verifier": own(name)}}}}}


@pytest.mark.parametrize(
    ("run", "field", "line"),
    [
        (algorithm(loss=own("loss")), "trainer.algorithm.loss", "loss"),
        (algorithm(loss=own("wrong_kinds")), "trainer.algorithm.loss", "wrong_kinds"),
        (algorithm(loss=own("no_way_back")), "trainer.algorithm.loss", "no_way_back"),
        (algorithm(advantage=own("advantage")), "trainer.algorithm.advantage", "advantage"),
        (masked("mask"), "trainer.algorithm.masks.0", "mask"),
        (curriculum(sampler=own("sampler")), "curriculum.sampler", "sampler"),
        (curriculum(planner=own("planner")), "curriculum.planner", "planner"),
        (curriculum(group_shaper=own("shaper")), "curriculum.group_shaper", "shaper"),
        (curriculum(planner=own("one_more"), group_shaper=own("shaper")), "curriculum.group_shaper", "shaper"),
        (curriculum(token_budget=own("budget")), "curriculum.token_budget", "budget"),
        (environment("environment"), "rollout.environment", "environment"),
        (environment("unborn"), "rollout.environment", "unborn"),
        (environment("leaves"), "rollout.environment", "leaves"),
        (environment("closed_file"), "rollout.environment", "closed_file"),
        (source("rows"), "data.source", "rows"),
        (source("lazy"), "data.source", "lazy"),
        ({"reward": {"verifier": own("verifier")}}, "reward.verifier", "verifier"),
        (composite("verifier"), "reward.verifier", "verifier"),
        ({**environment("Echo"), "reward": {"verifier": own("verifier")}}, "reward.verifier", "verifier"),
    ],
)
def test_a_plug_in_that_raises_is_refused_with_field_file_and_line_before_the_services_start(
    plugins: Path, run: dict[str, Any], field: str, line: str
) -> None:
    with pytest.raises((ConfigError, DataError)) as raised:
        try_run(**run)
    lines = plugins.read_text().splitlines()
    number = next(n for n, text in enumerate(lines, 1) if text.endswith(f"# here: {line}"))
    assert raised.value.final
    assert field in str(raised.value)
    assert f"{plugins}:{number}" in str(raised.value)


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (algorithm(loss=own("no_gradient")), "returned a loss without a gradient"),
        (environment("words"), "step returned str instead of an EnvironmentReply"),
        ({"reward": {"verifier": "builtins:max"}}, "reward.verifier=builtins:max: fails for 6 of 6 trial answers"),
        (environment("nan_reward"), "rollout.environment=.*nan_reward: returned nan, expected a finite number"),
        (environment("says_done"), "step returned done='no', expected True or False"),
        (environment("text_state"), "snapshot returned str instead of bytes"),
        (environment("half"), "step returned the text .*, in which character 3 is half of a surrogate pair"),
    ],
)
def test_a_plug_in_whose_result_cannot_be_used_is_refused_before_the_services_start(
    run: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RollmeshError, match=problem):
        try_run(**run)


@pytest.mark.parametrize(
    "run",
    [
        algorithm(loss=own("surrogate"), advantage=own("with_policy"), old_logprobs="recompute"),
        masked("keep_all"),
        curriculum(sampler=own("first_row")),
        curriculum(planner=own("one_more"), group_shaper=own("kept")),
        environment("Echo"),
        environment("Later"),
        {"reward": {"verifier": own("says_whether")}},
        composite("fair"),
    ],
)
def test_a_plug_in_that_works_or_waits_for_a_service_passes_its_trial(run: dict[str, Any]) -> None:
    assert not any("plugins_of_a_user" in hint for hint in try_run(**run))


def test_an_environment_of_a_file_whose_name_is_no_python_name_is_tried_too(plugins: Path) -> None:
    plugins.with_name("plug-ins.py").write_text(plugins.read_text())
    section = {"program": "environment", "environment": "plug-ins:words", "max_new_tokens": 64}
    with pytest.raises(ConfigError, match="rollout.environment=plug-ins:words: step returned str"):
        try_run(rollout=section)


def test_a_module_that_cannot_be_imported_is_a_final_error_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "half_written_plugin.py").write_text("import os\n\ndef loss(data, options)\n    return 1\n")
    (tmp_path / "plugin_of_a_missing_library.py").write_text("import os\nimport nowhere_installed\n")
    with pytest.raises(ConfigError, match=r"trainer\.algorithm\.loss.*half_written_plugin.py:3"):
        try_run(**algorithm(loss="half_written_plugin:loss"))
    with pytest.raises(ConfigError, match=r"No module named 'nowhere_installed' \(.*of_a_missing_library.py:2\)"):
        try_run(**algorithm(loss="plugin_of_a_missing_library:loss"))
