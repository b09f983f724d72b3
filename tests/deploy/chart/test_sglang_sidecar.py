"""The SGLang server of a manifest is the one that a generator would start itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.config import RunConfig, load_run_config
from rollmesh.generator.engines.sglang.sglang_options import SglangOptions

from .rendering import CHART, Helm, Object, Rendering

ONE_NODE = CHART / "ci" / "one-node-8-gpus-values.yaml"
KIND = CHART / "ci" / "kind-cpu-values.yaml"
SGLANG = ["generator.sglang.sidecar.enabled=true", "run.generator.engine=sglang", "run.model.path=/models/m"]
SEVERAL_NODES = CHART / "ci" / "multi-node-sglang-values.yaml"
BY_PLACE = {"--model-path", "--port", "--weight-version", "--config", "--max-total-tokens"}
"""Permitted differences: the model path, the port, and without a limit in the run file the size of the cache."""


def server_of(rendering: Rendering) -> Object:
    """The sidecar of the generator."""
    containers = rendering.component("generator")["spec"]["initContainers"]
    (server,) = [container for container in containers if container["name"] == "sglang"]
    assert server["restartPolicy"] == "Always", "a native sidecar"
    found: Object = server
    return found


def flags_of(command: list[str]) -> dict[str, str]:
    """Flags of a command line, written with = or as two words; a bare one is empty."""
    flags: dict[str, str] = {}
    last = ""
    for word in command:
        if word.startswith("--"):
            last, _, value = word.partition("=")
            flags[last] = value
        elif last:
            flags[last] = word
    return flags


def config_of(rendering: Rendering, folder: Path) -> RunConfig:
    """The run file of the manifests, as the generator's container reads it."""
    file = folder / "run.yaml"
    file.write_text(rendering.one("ConfigMap", "-run")["data"]["run.yaml"])
    (container,) = rendering.component("generator")["spec"]["containers"]
    environ = {e["name"]: e.get("value", "a-word-of-32-letters-and-figures") for e in container["env"]}
    return load_run_config(file, environ=environ)


@pytest.mark.parametrize(
    ("example", "sets"),
    [
        (ONE_NODE, []),
        (ONE_NODE, ["run.generator.on_new_version=keep_kv", "run.generator.slots=31"]),
        (SEVERAL_NODES, []),
        # Nothing said: the defaults of the chart are those of the run file.
        (KIND, [*SGLANG, "run.generator.slots=null", "run.generator.max_context_tokens=null"]),
    ],
)
def test_a_sidecar_gets_the_flags_and_variables_of_a_server_that_we_start(
    helm: Helm, tmp_path: Path, example: Path, sets: list[str]
) -> None:
    rendering = helm.template(CHART, [example], sets)
    options = SglangOptions.from_config(config_of(rendering, tmp_path), 0)
    server = server_of(rendering)
    wanted = flags_of(options.command(Path("/models/m"), 0, 1))
    found = flags_of(server["args"])

    missing = {flag: value for flag, value in wanted.items() if flag not in BY_PLACE and found.get(flag) != value}
    assert not missing, f"the sidecar has { ({flag: found.get(flag) for flag in missing}) }"
    assert found.get("--max-total-tokens") == (
        wanted["--max-total-tokens"] if options.generator.kv_token_capacity else None
    )
    assert found["--api-key"] == found["--admin-api-key"] == "$(SGLANG_KEY)"
    given = {entry["name"]: entry.get("value") for entry in server["env"]}
    assert given.items() >= options.server_environment({}).items()


def test_a_generator_asks_its_sidecar_with_the_key_that_the_sidecar_has(helm: Helm, tmp_path: Path) -> None:
    rendering = helm.template(CHART, [ONE_NODE], ["generator.sglang.sidecar.port=30123"])
    config = config_of(rendering, tmp_path)
    server = server_of(rendering)

    assert config.generator.sglang.url == f"http://127.0.0.1:{flags_of(server['args'])['--port']}"
    (generator,) = rendering.component("generator")["spec"]["containers"]
    (key,) = [e["valueFrom"] for e in generator["env"] if e["name"] == "ROLLMESH_GENERATOR__SGLANG__ADMIN_KEY"]
    assert key == next(e["valueFrom"] for e in server["env"] if e["name"] == "SGLANG_KEY")


def test_every_rank_of_a_server_over_several_nodes_gets_the_same_flags(helm: Helm) -> None:
    rendering = helm.template(CHART, [SEVERAL_NODES])
    (workers,) = rendering.of_kind("LeaderWorkerSet")
    (worker,) = workers["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    leader = server_of(rendering)

    assert worker["args"] == leader["args"] and worker["env"] == leader["env"]
    flags = flags_of(worker["args"])
    assert flags["--node-rank"] == "$(LWS_WORKER_INDEX)" and flags["--nnodes"] == "$(LWS_GROUP_SIZE)"
    shared = {mount["name"]: mount["mountPath"] for mount in worker["volumeMounts"]}
    ours = {
        m["name"]: m["mountPath"] for m in rendering.component("generator")["spec"]["containers"][0]["volumeMounts"]
    }
    assert shared["shared"] == ours["shared"] and shared["model"] == ours["model"], (
        "policies are at one path everywhere"
    )
