"""The way that a trainer uses the cores: which cores are idle, which way wins, and that the first choice is kept."""

import asyncio
import json
from pathlib import Path

import pytest

from rollmesh.config import RunConfig, write_run_config
from rollmesh.config.recipes import resolve_model
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.trainer_cores import CORES_FILE, CoreWay, fastest, idle_cores, trainer_way
from rollmesh.trainer.core_trial import random_batch, ways

from ...kit.run_files import made_run


def run_of(folder: Path, processes: int | str = "auto", **sections: object) -> RunConfig:
    small: dict[str, object] = {
        "data": {"max_prompt_tokens": 64},
        "rollout": {"max_new_tokens": 64},
        "generator": {"replicas": 2, "device": "cpu", "max_context_tokens": 512},
        "trainer": {"device": "cpu", "tokens_per_microbatch": 512},
        "launcher": {"trainer_processes": processes},
    }
    return made_run(folder, **small | sections)


def chosen(config: RunConfig, folder: Path, cores: int) -> tuple[CoreWay, list[str]]:
    run, notes = RunFolder(folder), []
    run.logs.mkdir(exist_ok=True)
    write_run_config(config, run.config_file)
    return asyncio.run(trainer_way(config, run, notes.append, cores)), notes


@pytest.mark.parametrize(
    ("generator", "on_gpu", "idle"),
    [
        ({"replicas": 3, "device": "cpu"}, True, 5),
        ({"replicas": 3}, False, 5),
        ({"replicas": 3}, True, 8),  # on the GPU
        ({"replicas": 9}, False, 1),
    ],
)
def test_cores_are_idle_that_no_generator_decodes_on_and_no_teacher_computes_on(tmp_path, generator, on_gpu, idle):
    config = run_of(tmp_path, generator={**generator, "max_context_tokens": 512})
    assert idle_cores(config, 8, on_gpu=on_gpu) == idle
    near, far = {"model": "m", "replicas": 2, "domains": ["a"]}, {"address": "far:7070", "domains": ["b"]}
    taught = config.model_dump() | {"teachers": {"near": near, "far": far}}
    taught["trainer"]["algorithm"]["teacher"] = {"reverse_kl_coefficient": 1.0}
    taught["data"] |= {"source": {"type": "jsonl", "path": "rows.jsonl"}, "domain_field": "domain"}
    computing = RunConfig.model_validate(taught)
    assert idle_cores(computing, 8, on_gpu=on_gpu) == (idle if on_gpu else max(1, idle - 2))


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ((1.0, 0.8, 0.6), 2),
        ((1.0, 0.8, 0.73), 1),  # a tenth of 0.8 would be 0.72
        ((1.0, 0.91, 0.92), 0),
        ((1.0, None, 0.5), 2),
        ((None, 0.8, 0.9), 1),
    ],
)
def test_more_processes_or_threads_must_save_a_tenth_of_the_time(seconds, taken):
    shapes = ((1, 1), (1, 4), (4, 1))
    tried = [CoreWay(processes=p, threads=t, seconds=s) for (p, t), s in zip(shapes, seconds, strict=True)]
    assert fastest(tried, 1) is tried[taken]
    assert fastest([], 3) == CoreWay(processes=1, threads=3)


def test_the_ways_of_eight_cores_use_all_of_them_but_the_first():
    assert ways(8) == [(1, 1), (1, 8), (2, 4), (4, 2), (8, 1)]
    assert ways(2) == [(1, 1), (1, 2), (2, 1)]


@pytest.mark.parametrize(("gigabytes", "tokens"), [(0.001, 2 * 512), (1, 48), (100, 8)])
def test_a_step_of_a_large_model_has_fewer_tokens_so_that_it_ends_in_time(tmp_path, gigabytes, tokens):
    (tmp_path / "config.json").write_bytes((resolve_model("recipe:countdown") / "config.json").read_bytes())
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(int(gigabytes * 10**9))  # takes no room on the disk
    batch = random_batch(run_of(tmp_path, model={"path": str(tmp_path)}), 2)
    assert sum(each.response_token_count for group in batch.groups for each in group.trajectories) == tokens


def test_each_way_is_tried_once_on_the_cores_that_are_idle_and_another_machine_is_measured_again(tmp_path):
    config = run_of(tmp_path)
    elsewhere = {"cores": 7, "taken": {"processes": 7, "threads": 1, "seconds": 1.0}}
    (tmp_path / CORES_FILE).write_text(json.dumps(elsewhere))
    way, notes = chosen(config, tmp_path, 4)
    record = json.loads((tmp_path / CORES_FILE).read_text())
    tried = [CoreWay(**each) for each in record["tried"]]
    assert [(each.processes, each.threads) for each in tried] == [(1, 1), (1, 2), (2, 1)]
    assert all(each.seconds > 0 for each in tried)
    assert way == fastest(tried, 1) == CoreWay(**record["taken"])
    assert notes[0] == "measuring the processes and threads of the trainer on 2 of 4 cores"
    assert notes[1].startswith(f"trainer: {way}; a train step takes: 1 process of 1 thread ")
    assert chosen(config, tmp_path, 4) == (way, [f"trainer: {way}, as measured before"])


def test_a_model_that_cannot_be_loaded_leaves_one_process_and_no_record(tmp_path):
    way, notes = chosen(run_of(tmp_path, model={"path": str(tmp_path / "missing")}), tmp_path, 4)
    assert way == CoreWay(processes=1, threads=1)
    assert notes[-1] == "trainer: 1 process of 1 thread; a train step takes: unknown"
    assert not (tmp_path / CORES_FILE).exists()
    assert "missing" in (tmp_path / "logs" / "trainer-cores.log").read_text()


@pytest.mark.parametrize(
    ("processes", "optimizer", "cores", "expected"),
    [(3, "adamw", 8, 3), ("auto", "adamw_8bit", 8, 1), ("auto", "adamw", 3, 1), ("auto", "adamw", 1, 1)],
)
def test_nothing_is_measured_for_a_number_or_where_there_is_nothing_to_choose(
    tmp_path, processes, optimizer, cores, expected
):
    way, _ = chosen(run_of(tmp_path, processes, trainer={"optimizer": optimizer}), tmp_path, cores)
    assert way == CoreWay(processes=expected, threads=1)
    assert not (tmp_path / "logs" / "trainer-cores.log").exists()
