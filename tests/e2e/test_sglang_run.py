"""The whole mesh on two real SGLang servers, one of which is killed on the way: truncated sampling, and adapters."""

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.config import load_run_config
from rollmesh.launcher.redis import running_store
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.runtime.endpoints import read_endpoints

from ..kit.environments import python_of
from ..sglang_cpu.server import UNPINNED
from .conftest import assert_rescored

pytestmark = pytest.mark.long

_STEPS = 16
_SERVER_SECONDS = 600.0
"""A start of the server is 25 CPU seconds of imports in three processes, and there are two servers beside a trainer."""
LOGS = ("logs/generator-0.log", "logs/generator-1.log")


@pytest.fixture(params=["full weights, truncated sampling", "adapters"])
def sections(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A run on the real server; skips where it is not installed."""
    server = {
        "python": str(python_of("sglang-cpu")),
        "environment": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
    }
    changes: dict[str, Any] = {"rollout": {"top_p": 0.95, "min_p": 0.01}}
    if request.param == "adapters":
        server["environment"].update(UNPINNED)
        # Each batch waits for its own version: no version but the last one may be without tokens in a batch.
        changes = {
            "model": {"adapter": {"rank": 8}},
            "schedule": {"preset": "sync", "max_staleness": 0, "pool_size": 16},
        }
    return changes | {
        "data": {"source": {"type": "countdown", "min_numbers": 3, "max_numbers": 4}},
        "generator": {"engine": "sglang", "device": "cpu", "replicas": 2, "slots": 32, "sglang": server},
        "trainer": {"train_steps": _STEPS},
        "evaluation": {"prompt_count": 8},
        "store": {"heartbeat_seconds": 1.0, "session_ttl_seconds": 10.0},
    }


def servers(generator_pid: int) -> list[psutil.Process]:
    """The main process of the SGLang server below a generator; none while there is none."""
    try:
        below = psutil.Process(generator_pid).children(recursive=True)
        # An ended one whose parent does not know yet has no command line.
        commands = [(p, p.as_dict(["cmdline"], ad_value=[])["cmdline"]) for p in below]
        return [
            p for p, words in commands if "sglang.launch_server" in words and "orphan_guard.py" not in " ".join(words)
        ]
    except psutil.NoSuchProcess:
        return []


def records(log: Path) -> list[dict[str, Any]]:
    """Entries of a service's log."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{")]


def in_service(log: Path, starts: int = 1) -> bool:
    """Tell whether a generator has served a policy since its server was started so many times."""
    events = [e["event"] for e in records(log) if e["event"] in ("server_started", "policy_in_service")]
    return events.count("server_started") == starts and events[-1] == "policy_in_service"


def alive(process: psutil.Process) -> bool:
    """Tell whether a process still runs."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def pause(run_folder: Path, paused: bool) -> None:
    """Stop workers from leasing, or let them continue."""
    folder = RunFolder(run_folder)
    async with running_store(load_run_config(folder.config_file), folder) as running:
        await running.store.settings.set_user_paused(paused)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_run_on_two_servers_loses_nothing_when_one_of_them_is_killed(started, sections, wait_until, capsys) -> None:
    line, process = started(**sections)

    def generating() -> int:
        """Processes of the second generator that have sampled tokens."""
        looks = line.json_lines("timeline.jsonl")
        counts = looks[-1]["generated_tokens"] if looks else {}
        return sum(name.startswith("1:") and count > 0 for name, count in counts.items())

    log = line.folder / LOGS[1]
    wait_until(
        lambda: len(line.steps) >= 2 and generating() == 1,
        "two train steps and tokens of both servers",
        process,
        _SERVER_SECONDS,
    )
    assert in_service(log)
    everything = psutil.Process(process.pid).children(recursive=True)
    (victim,) = servers(next(e.pid for e in read_endpoints(line.folder, "generator") if e.index == 1))
    victim.kill()
    line.trains(process, 2)
    # No new answers until the killed one is back: the rest of the run would be over before.
    asyncio.run(pause(line.folder, True))
    wait_until(lambda: in_service(log, starts=2), "the killed server to serve again", process, _SERVER_SECONDS)
    everything += psutil.Process(process.pid).children(recursive=True)
    asyncio.run(pause(line.folder, False))
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert generating() == 2

    audit = line.audit()
    assert_rescored(audit)
    assert line.steps == list(range(1, _STEPS + 1))
    config = load_run_config(line.folder / "config.yaml")
    store = open_checkpoints(config)
    published = {record.policy_version for record in store.complete_policies()}
    written = {
        segment.policy_version
        for step in range(1, _STEPS + 1)
        for group in store.read_batch(step).groups
        for trajectory in group.trajectories
        for segment in trajectory.segments
    }
    entries = [entry for name in LOGS for entry in records(line.folder / name)]
    loaded = {entry["policy_version"] for entry in entries if entry["event"] == "policy_in_service"}
    assert published == set(range(_STEPS + 1))
    if config.model.adapter is not None:
        assert written == published - {_STEPS}
        kinds = [store.open(record).manifest.kind for record in store.complete_policies()]
        assert sorted(kinds) == ["adapter"] * _STEPS + ["full"]
    assert written <= loaded <= published
    # Not all of them: one that another follows at once may have no token, or none in a group that is trained. But each
    # batch has tokens of its own time.
    assert len(written) >= 1 + (_STEPS - 1) // (audit["max_staleness"] + 1)
    # The newest have no answer in a batch yet: so far may an answer be behind when it is trained.
    assert max(written) >= _STEPS - 1 - audit["max_staleness"]
    wait_until(lambda: not any(map(alive, everything)), "the last process to end")

    with capsys.disabled():
        gap, tokens = audit["rescoring"]["largest_gap"], audit["rescoring"]["tokens"]
        versions = f"{len(published)} versions published, {len(loaded)} served, {len(written)} in segments"
        print(f"\n[SGLang run: {versions}; largest gap {gap:.1e} nats over {tokens} tokens]", end=" ")
