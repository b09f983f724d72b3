"""Refusals before any folder is created or process started."""

import importlib.util
import io
import shutil
import sys
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.errors import ConfigError, DataError
from rollmesh.preflight.run_checks import RunChecks, check_run

from ...kit.run_files import made_run


def run(**sections: Any) -> RunConfig:
    context = {"generator": {"max_context_tokens": 1024}, "data": {"max_prompt_tokens": 512}}
    lengths = {name: {**fields, **sections.pop(name, {})} for name, fields in context.items()}
    return made_run(**sections, **lengths)


def checked(config: RunConfig) -> RunChecks:
    return check_run(config, tries_inputs=False)


def described(**sections: Any) -> str:
    """The table of the estimate, without its borders."""
    out = io.StringIO()
    Console(file=out, width=200).print(checked(run(**sections)).estimate.table())
    return " ".join(out.getvalue().replace("│", " ").split())


def test_a_pool_is_described_and_an_automatic_one_by_its_most_and_by_its_staleness() -> None:
    assert "pool_size 100 trajectories in flight" in described(schedule={"pool_size": 100})
    text = described(schedule={"pool_size": "auto"})
    assert "auto, at most 192" in text
    assert "more where groups take longer than an update to be ready" in text


@pytest.mark.parametrize(
    ("preset", "rows"),
    [
        ("copris", ()),
        ("rollpacker", ("20%", "4 open beyond the wave; late ones lose their tokens and wait for a long round")),
        ("ulorl", ("16 open beyond the wave; late ones continue in the next wave", "64 tokens of one policy")),
    ],
)
def test_what_a_schedule_throws_away_or_lets_wait_is_described(preset: str, rows: tuple[str, ...]) -> None:
    text = described(schedule={"preset": preset})
    assert all(row in text for row in rows), text
    assert ("spare groups" in text) is bool(rows)


@pytest.mark.parametrize(("groups", "waits"), [(16, False), (128, True)])
def test_the_memory_of_the_queue_is_held_against_its_limit(groups: int, waits: bool) -> None:
    store, schedule = {"maxmemory_bytes": 1 << 24}, {"groups_per_batch": groups}
    text = described(store=store, schedule=schedule)
    assert "of store.maxmemory_bytes" in text
    assert ("above 80% admission waits: increase it" in text) is waits
    own = checked(run(schedule=schedule, store={**store, "url": "redis://queue:6379"})).estimate
    assert own.queue_limit_bytes is None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"path": "recipe:chess"}}, "recipe:chess: .* recipes: countdown"),
        ({"reward": {"verifier": "mine:reward"}}, "verifier=mine:reward: would never be used, .* countdown source"),
        (
            {"data": {"evaluation_source": {"type": "parquet", "path": "absent.parquet"}}},
            "data.evaluation_source.path=absent.parquet: no such",
        ),
    ],
)
def test_a_run_that_cannot_start_is_refused_by_field(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(run(**sections))


@pytest.mark.parametrize(
    ("renderer", "words"),
    [("qwen4", "'qwen4' is unknown; known are qwen3, "), ("llama-3", "llama-3 does not fit the tokenizer of ")],
)
def test_a_renderer_that_does_not_know_the_tokenizer_is_refused_before_the_services_start(
    renderer: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"agents.renderer: {words}"):
        check_run(run(rollout={"program": "agent"}, agents={"renderer": renderer}))


def test_a_folder_with_a_config_but_no_weights_or_tokenizer_or_with_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="contains no \\*.safetensors"):
        checked(run(model={"path": str(tmp_path)}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(DataError, match="needs a fast tokenizer"):
        checked(run(model={"path": str(tmp_path)}))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="contains an adapter .*; merge it into its base with peft's merge_and_unlo"):
        checked(run(model={"path": str(tmp_path)}))


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="this Python has SGLang")
def test_a_python_without_sglang_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def on(python: str | None, **more: Any) -> RunConfig:
        return run(generator={"engine": "sglang", "sglang": {"python": python, **more}})

    with pytest.raises(ConfigError, match=r"sglang.python=this Python: has no SGLang; install the extra"):
        checked(on(None))
    with pytest.raises(ConfigError, match=r"sglang.python=.*python.*: has no SGLang"):
        checked(on(sys.executable))
    with pytest.raises(ConfigError, match=r"sglang.python=no/python: cannot be run: .*No such file"):
        checked(on("no/python"))
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    checked(on(sys.executable, environment={"PYTHONPATH": str(tmp_path)}))
    checked(run(generator={"engine": "sglang", "sglang": {"url": "http://127.0.0.1:30000"}}))
    # In a cluster the file is checked in every pod, and only those of generators have SGLang.
    checked(run(generator={"engine": "sglang"}, network={"shared_folder": False}))


def test_a_variable_that_the_chat_template_does_not_read_or_that_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"_kwargs.since=datetime.date\(.*\): expected finite numbers"):
        run(data={"chat_template_kwargs": {"since": date(2026, 1, 1)}})
    model = tmp_path / "model"
    shutil.copytree(resolve_model("recipe:countdown"), model)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}{{ '?' if enable_thinking }}")
    for name, refused in (("enable_thinking", False), ("thinking", True)):
        config = run(model={"path": str(model)}, data={"chat_template_kwargs": {name: False}})
        with pytest.raises(DataError, match="data.chat_template_kwargs.thinking: ") if refused else nullcontext():
            checked(config)
