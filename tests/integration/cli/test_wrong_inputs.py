"""Wrong inputs: each is refused before a folder is made, with field, value and remedy; tests/unit/config has more."""

import gzip
import json
import shutil
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.config import load_run_config
from rollmesh.config.recipes import resolve_model
from rollmesh.launcher.run_folder import locked_run_folder
from rollmesh.preflight import trial

ROW = {"prompt": "1 2 5 > 7 :", "answer": "7"}
VERIFIERS = """
import os, socket, sys, time
def no_judge(response, metadata):
    try:
        socket.create_connection(("127.0.0.1", int(metadata["answer"])), 5)
    except OSError as error:
        raise RuntimeError("the judge is down") from error
def never(response, metadata):
    while True: time.sleep(1)
def no_name(response, metadata): return metadata["nope"]
def only_the_reference(response, metadata): return float(int(response) == int(metadata["answer"]))
def leaves(response, metadata): os._exit(3)
def rows(): return 7
"""


def table(text: str | bytes, **fields: Any) -> Callable[[Path], dict[str, Any]]:
    """A run over a JSONL file with this content."""

    def write(folder: Path) -> dict[str, Any]:
        (folder / "rows.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
        return {"data": {"source": {"type": "jsonl", "path": "rows.jsonl", **fields}}, "reward": {"verifier": "exact"}}

    return write


def verifier(name: str, **reward: Any) -> Callable[[Path], dict[str, Any]]:
    """A run over good rows with this verifier."""

    def write(folder: Path) -> dict[str, Any]:
        run = table("".join(json.dumps({**ROW, "prompt": f"1 2 {n} > 7 :"}) + "\n" for n in range(3, 9)))(folder)
        return {**run, "reward": {"verifier": name, **reward}}

    return write


def model(change: Callable[[Path], object]) -> Callable[[Path], dict[str, Any]]:
    """A run with a changed copy of the demo's model."""

    def write(folder: Path) -> dict[str, Any]:
        shutil.copytree(resolve_model("recipe:countdown"), folder / "model")
        change(folder / "model")
        return {"model": {"path": "model"}}

    return write


def sections(**changed: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda _: changed


def own_sampler(name: str) -> Callable[[Path], dict[str, Any]]:
    source = {"type": "countdown", "puzzles": 50}
    return sections(data={"source": source}, reward={"verifier": "countdown"}, curriculum={"sampler": name})


def method(**curriculum: Any) -> Callable[[Path], dict[str, Any]]:
    return sections(curriculum=curriculum, trainer={"algorithm": {"advantage": "dr_grpo"}})


def algorithm(**changed: Any) -> Callable[[Path], dict[str, Any]]:
    return sections(trainer={"algorithm": changed})


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")


def other_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 8}))


def user_only(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )


def huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


WRONG: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "positions": (
        sections(generator={"max_context_tokens": 4096}),
        "is more than the model's max_position_embeddings=",
    ),
    "environment": (
        sections(rollout={"program": "environment", "environment": "abacus"}),
        "rollout.environment: 'abacus' is none of calculator",
    ),
    "hub name": (
        sections(model={"path": "Qwen/Qwen3-0.6B"}),
        "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B",
    ),
    "no model": (sections(model={"path": "absent"}), "model.path=absent: absent contains no config.json"),
    "git-lfs pointer": (model(pointer), "a git-lfs pointer, not weights; run git lfs pull"),
    "cut weights": (model(cut), "bytes; copy or download it again"),
    "no header": (model(huge_header), "model.safetensors: not a safetensors file"),
    "other vocabulary": (model(other_vocabulary), "use weights and config of the same model"),
    "no such file": (
        sections(data={"source": {"type": "jsonl", "path": "absent.jsonl"}}),
        "data.source.path=absent.jsonl: no such file",
    ),
    "packed": (
        table(gzip.compress(json.dumps(ROW).encode())),
        "rows.jsonl: not JSON lines: the file is compressed with",
    ),
    "role": (
        lambda f: {
            **table('{"prompt": [{"role": "User", "content": "4 + 4"}], "answer": "8"}')(f),
            **model(user_only)(f),
        },
        "rows.jsonl:1: field 'prompt': message 0 (role 'User'): its content would not be in the prompt",
    ),
    "field twice in a row": (
        table('{"prompt": "1 2", "answer": "1", "answer": "2"}\n'),
        "rows.jsonl:1: not valid JSON: field 'answer' is set more than once",
    ),
    "missing field": (table('{"question": "1 2", "answer": "1"}\n'), "field 'prompt' is missing; the row has question"),
    "chat without template": (table(json.dumps(ROW), chat=True), "rows.jsonl:1: field 'prompt'"),
    "scores the reference only": (verifier("checks:only_the_reference"), "fails for 5 of 6 trial answers"),
    "ends the process": (verifier("checks:leaves"), "the trial of checks:leaves ended its process with status 3"),
    "never returns": (
        verifier("checks:never", timeout_seconds=0.5),
        "within 2 s; raise reward.timeout_seconds=0.5, or find what the verifier waits for",
    ),
    "a later verifier of the rows": (
        table(
            "".join(json.dumps({**ROW, "prompt": f"1 2 {n} > 7 :", "by": "exact"}) + "\n" for n in range(3, 9))
            + json.dumps({"prompt": "1 2 9 > 7 :", "answer": "Paris", "by": "choice"}),
            verifier_field="by",
        ),
        "reward.verifier=choice: fails for 6 of 6 trial answers to rows.jsonl:7",
    ),
    "http_judge without options": (verifier("http_judge"), "reward.options: http_judge missing"),
    "endless run": (sections(trainer={"train_steps": 10**18}), "trainer.train_steps=1000000000000000000: expected at"),
    "checkpoints below a file": (
        sections(checkpoints={"folder": "checks.py/checkpoints"}),
        "checkpoints.folder=checks.py/checkpoints: ",
    ),
    "ranks": (sections(launcher={"trainer_processes": 5000}), "launcher.trainer_processes=5000: more than"),
    "unknown address": (sections(network={"host": "nowhere.invalid"}), "network.host=nowhere.invalid: "),
    "brackets": (sections(launcher={"host": "[::1]"}), "launcher.host=[::1]: [::1] refuses it"),
    "too many replicas": (sections(generator={"replicas": 5000}), "generator.replicas=5000: the run file starts 5002"),
    "rows are a number": (
        lambda folder: {**verifier("exact")(folder), "data": {"source": {"type": "python", "target": "checks:rows"}}},
        "checks:rows must return rows, got int",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 240.0)  # a loaded machine; no input here is slow
    (tmp_path / "checks.py").write_text(VERIFIERS)
    return tmp_path


def write_run(folder: Path, changed: dict[str, Any]) -> None:
    base = {
        "name": "wrong",
        "folder": str(folder / "run"),
        "model": {"path": "recipe:countdown"},
        "data": {"max_prompt_tokens": 256},
        "rollout": {"max_new_tokens": 128},
        "generator": {"max_context_tokens": 512},
    }
    merged = {**base, **changed}
    for name in ("data", "rollout", "generator"):
        merged[name] = {**base[name], **changed.get(name, {})}
    (folder / "run.yaml").write_text(yaml.safe_dump(merged))


def refused(folder: Path, changed: dict[str, Any], *options: str) -> str:
    """Start a run; return its error, after checking that nothing was written."""
    write_run(folder, changed)
    done = CliRunner().invoke(app, ["up", "run.yaml", *options])
    assert done.exit_code == 2, done.output
    assert not (folder / "run").exists()
    return done.stderr


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_refused_with_its_field_before_anything_is_written(folder: Path, name: str) -> None:
    write, expected = WRONG[name]
    message = refused(folder, write(folder))
    assert expected in message, message
    assert "Traceback" not in message


def test_the_trial_of_the_inputs_uses_the_value_of_an_option_and_not_the_variable_that_it_overrides(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_REWARD__VERIFIER", "exact")
    write_run(folder, verifier("exact")(folder))
    validate = ["config", "validate", "run.yaml", "--set", "reward.verifier=checks:no_name"]
    done = CliRunner().invoke(app, validate)
    assert done.exit_code == 2
    assert "reward.verifier=checks:no_name: fails for 6 of" in done.stderr


@pytest.mark.parametrize("host", ["127.0.0.1:1", "nowhere.invalid:6379"])
def test_a_validation_says_that_no_redis_answers_at_the_address(folder: Path, host: str) -> None:
    write_run(folder, {"store": {"url": f"redis://:secret@{host}/0"}})
    done = CliRunner().invoke(app, ["config", "validate", "run.yaml"])
    assert done.exit_code == 2 and f"store.url=redis://{host}/0: " in done.stderr, done.output
    assert "start that server, or correct the address" in done.stderr and "secret" not in done.output


def listening(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def second_of_two_ports() -> int:
    """Return a free port after a free one, below those that a program gets that asks for any port."""
    for port in range(23_002, 32_000, 2):
        with suppress(OSError), listening(port - 1), listening(port):
            return port
    raise OSError("no two free ports")


def test_an_agent_run_whose_port_is_taken_is_refused(folder: Path) -> None:
    run = {"rollout": {"program": "agent"}, "launcher": {"agents_replicas": 2}}
    port = second_of_two_ports()
    with listening(port):
        message = refused(folder, {**run, "agents": {"port": port}})
        of_the_second = refused(folder, {**run, "agents": {"port": port - 1}})
    assert f"agents.port={port}: 127.0.0.1 refuses it" in message
    assert f"agents.port={port - 1} + 1 (launcher.agents_replicas): 127.0.0.1 refuses it" in of_the_second
    assert "agents.port=65535 + 1 (launcher.agents_replicas): no port is" in refused(
        folder, {**run, "agents": {"port": 65535}}
    )


def test_a_live_run_of_the_same_folder_is_named_not_its_port(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        changed = {"agents": {"port": taken.getsockname()[1]}, "rollout": {"program": "agent"}}
        write_run(folder, changed)
        with locked_run_folder(load_run_config(folder / "run.yaml")):
            done = CliRunner().invoke(app, ["up", "run.yaml"])
    assert done.exit_code == 2
    assert "another launcher (pid" in done.stderr and "runs there; stop it first" in done.stderr
    assert "agents.port" not in done.stderr


@pytest.mark.parametrize("place", ["/proc/rollmesh", "file/run", "file"])
def test_a_run_folder_that_cannot_be_made_is_refused_with_the_reason(folder: Path, place: str) -> None:
    (folder / "file").write_text("not a folder")
    write_run(folder, {})
    done = CliRunner().invoke(app, ["up", "run.yaml", "--folder", place])
    assert done.exit_code == 2, done.output
    assert f"folder={place}: cannot be created" in done.stderr and "Traceback" not in done.output


def test_a_judge_of_a_users_verifier_that_is_down_is_no_wrong_input(folder: Path) -> None:
    write_run(folder, verifier("checks:no_judge")(folder))
    done = CliRunner().invoke(app, ["config", "validate", "run.yaml"])
    assert done.exit_code == 0, done.output
    assert "run.yaml: valid" in done.output


def test_a_validation_says_what_only_another_machine_could_start(folder: Path) -> None:
    write_run(folder, {"generator": {"replicas": 5000}})
    done = CliRunner().invoke(app, ["config", "validate", "run.yaml"])
    assert done.exit_code == 0, done.output
    assert "hint: on this machine rollmesh up refuses generator.replicas=5000: the run file starts 5002" in done.output
