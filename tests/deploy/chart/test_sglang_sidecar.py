"""The SGLang server of a manifest is the one that a generator would start itself."""

from pathlib import Path

import pytest
import yaml

from rollmesh.config import RunConfig, load_run_config
from rollmesh.generator.engines.policy_folders import AdapterSettings
from rollmesh.generator.engines.sglang.sglang_options import SglangOptions, check_lora_server, lora_flags

from .rendering import CHART, Helm, HelmError, Object, Rendering

ONE_NODE = CHART / "ci" / "one-node-8-gpus-values.yaml"
KIND = CHART / "ci" / "kind-cpu-values.yaml"
SGLANG = ["generator.sglang.sidecar.enabled=true", "run.generator.engine=sglang", "run.model.path=/models/m"]
LEAST = ["run.name=least", *SGLANG]
"""The shortest run file with SGLang: its other fields have their defaults."""
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
    ("examples", "sets"),
    [
        ([ONE_NODE], []),
        ([ONE_NODE], ["run.generator.on_new_version=keep_kv", "run.generator.slots=31"]),
        ([SEVERAL_NODES], []),
        # The defaults of the chart are those of the run file.
        ([], LEAST),
    ],
)
def test_a_sidecar_gets_the_flags_and_variables_of_a_server_that_we_start(
    helm4: Helm, tmp_path: Path, examples: list[Path], sets: list[str]
) -> None:
    rendering = helm4.template(CHART, examples, sets)
    options = SglangOptions.from_config(config_of(rendering, tmp_path), 0)
    server = server_of(rendering)
    wanted = flags_of(options.command(Path("/models/m"), 0, 1))
    found = flags_of(server["args"])
    missing = {flag: value for flag, value in wanted.items() if flag not in BY_PLACE and found.get(flag) != value}
    assert not missing, f"the sidecar has { ({flag: found.get(flag) for flag in missing}) }"
    assert found.get("--max-total-tokens") == (
        wanted["--max-total-tokens"] if options.generator.kv_token_capacity else None
    )
    assert '--api-key="$key" --admin-api-key="$key" "$@"' in server["command"][2]
    given = {entry["name"]: entry.get("value") for entry in server["env"]}
    assert given.items() >= options.server_environment({}).items()


def test_a_variable_that_the_values_give_the_sidecar_is_there_once(helm4: Helm) -> None:
    extra = "generator.sglang.sidecar.extraEnv[0]"
    server = server_of(helm4.template(CHART, [ONE_NODE], [f"{extra}.name=no_proxy", f"{extra}.value=corp"]))
    assert [entry["value"] for entry in server["env"] if entry["name"] == "no_proxy"] == ["corp"]
    assert [entry["value"] for entry in server["env"] if entry["name"] == "NO_PROXY"] == ["127.0.0.1,localhost"]


def test_a_generator_asks_its_sidecar_with_the_key_that_the_sidecar_has(helm4: Helm, tmp_path: Path) -> None:
    rendering = helm4.template(CHART, [ONE_NODE], ["generator.sglang.sidecar.port=30123"])
    config = config_of(rendering, tmp_path)
    server = server_of(rendering)
    assert config.generator.sglang.url == f"http://127.0.0.1:{flags_of(server['args'])['--port']}"
    (generator,) = rendering.component("generator")["spec"]["containers"]
    (key,) = [e["valueFrom"] for e in generator["env"] if e["name"] == "ROLLMESH_GENERATOR__SGLANG__ADMIN_KEY"]
    assert key == next(e["valueFrom"] for e in server["env"] if e["name"] == "SGLANG_KEY")


def test_every_rank_of_a_server_over_several_nodes_gets_the_same_flags(helm4: Helm) -> None:
    rendering = helm4.template(CHART, [SEVERAL_NODES])
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


RANK_8 = "run.model.adapter.rank=8"
NO_BOUND = "run.schedule.max_staleness=null"
SEVEN_LAYERS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")


def lora_words(server: Object) -> list[str]:
    """The words of a server's command line from its adapter flags on."""
    words = [word for argument in server["args"] for word in argument.split("=", 1)]
    return words[words.index("--enable-lora") :]


@pytest.mark.parametrize(
    ("examples", "sets"),
    [
        ([ONE_NODE], [RANK_8]),
        ([ONE_NODE], [RANK_8, "run.schedule.max_staleness=0",
                      "run.model.adapter.target={v_proj,q_proj,o_proj,q_proj}"]),
        ([ONE_NODE], [RANK_8, NO_BOUND, "run.schedule.preset=one_step_off"]),
        # These schedules set the bound in groups.
        ([KIND], [*SGLANG, RANK_8, NO_BOUND, "run.schedule.preset=pipeline", "run.schedule.window_groups=33"]),
        ([], [*LEAST, RANK_8, "run.schedule.preset=roll", "run.schedule.window_groups=33"]),
        ([KIND], [*SGLANG, RANK_8, "run.schedule.preset=roll", "run.schedule.window_groups=40"]),
        # The defaults of the chart are those of the run file.
        ([], [*LEAST, "run.model.adapter.alpha=16"]),
    ],
)  # fmt: skip
def test_a_sidecar_gets_the_adapter_flags_of_a_server_that_we_start(
    helm4: Helm, tmp_path: Path, examples: list[Path], sets: list[str]
) -> None:
    rendering = helm4.template(CHART, examples, ["run.schedule.pool_size=null", *sets])
    config = config_of(rendering, tmp_path)
    settings = AdapterSettings.from_config(config)
    assert settings is not None
    # A template cannot read the layers of a model.
    target = settings.config.target
    targets = ["all"] if target == "all_linear" else sorted(set(target))
    wanted = lora_flags(settings, targets, config.generator.slots)
    found = lora_words(server_of(rendering))
    assert found[: len(wanted)] == wanted
    assert found[len(wanted) :] == flags_after(examples), "flags of the values come last, so they win"
    info = {
        "enable_lora": True,
        "lora_strict_loading": True,
        "max_lora_rank": int(found[found.index("--max-lora-rank") + 1]),
        "max_loaded_loras": int(found[found.index("--max-loaded-loras") + 1]),
        "lora_target_modules": found[found.index("--lora-target-modules") + 1 : len(wanted)],
    }
    check_lora_server(info, "http://127.0.0.1:30000", settings, SEVEN_LAYERS if targets == ["all"] else targets)


def flags_after(examples: list[Path]) -> list[str]:
    """The flags of the examples' own, word by word."""
    generators = [yaml.safe_load(example.read_text())["generator"] for example in examples]
    arguments = [a for g in generators for a in g.get("sglang", {}).get("sidecar", {}).get("args", [])]
    return [word for argument in arguments for word in argument.split("=", 1)]


def test_every_rank_gets_the_adapter_flags_and_no_run_of_full_weights_does(helm4: Helm) -> None:
    rendering = helm4.template(CHART, [SEVERAL_NODES], [RANK_8, "run.generator.on_new_version=null"])
    (workers,) = rendering.of_kind("LeaderWorkerSet")
    (worker,) = workers["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    assert lora_words(worker) == lora_words(server_of(rendering))
    assert flags_of(worker["args"])["--max-lora-rank"] == "8"
    for example in (ONE_NODE, SEVERAL_NODES):
        assert not [a for a in server_of(helm4.template(CHART, [example]))["args"] if "lora" in a]


def test_an_unknown_schedule_is_refused_with_the_known_ones(helm4: Helm) -> None:
    with pytest.raises(HelmError, match=r"run\.schedule\.preset=coprs is unknown; use one of april, .*copris"):
        helm4.template(CHART, [ONE_NODE], [RANK_8, "run.schedule.preset=coprs"])


def test_a_target_that_the_run_file_refuses_is_refused_with_the_two_forms(helm4: Helm) -> None:
    message = r"run\.model\.adapter\.target=q_proj is neither all_linear nor a list .* write all_linear, or a list"
    with pytest.raises(HelmError, match=message):
        helm4.template(CHART, [ONE_NODE], [RANK_8, "run.model.adapter.target=q_proj"])
