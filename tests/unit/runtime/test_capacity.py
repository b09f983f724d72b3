"""Capacity of a machine, and of the control groups of a container."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollmesh.config.load import validate_run_config
from rollmesh.errors import ConfigError
from rollmesh.runtime.capacity import Machine, available_memory, check_configured, cpu_quota, refuse_overload

SMALL = Machine(cores=2, available_bytes=8 << 30)
WANTED = {"generator": 2, "reward": 1, "rollout": 1}
GIB = 1 << 30
V2 = "31 23 0:28 / {fs} ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate"
V1_MEMORY = "35 31 0:32 {root} {fs}/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 {root} {fs}/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"
UNIFIED = "41 31 0:38 / {fs}/unified rw,relatime - cgroup2 cgroup2 rw"
V1_UNLIMITED = "9223372036854771712\n"
GROUPS_V1 = "9:name=systemd:/\n4:memory:{path}\n1:cpu,cpuacct:{path}\n0::/\n"


def test_more_processes_than_the_cores_can_take_are_refused() -> None:
    refuse_overload(SMALL, WANTED, "generator", 14, 100 << 20)
    with pytest.raises(ConfigError, match=r"generator=178: 180 .* are more than 16, 8 for each of the 2 cores"):
        refuse_overload(SMALL, WANTED, "generator", 178, 100 << 20)


def test_more_processes_than_the_memory_can_take_are_refused() -> None:
    refuse_overload(SMALL, WANTED, "generator", 5, 2 << 30)
    fewer = {**WANTED, "generator": 200}
    refuse_overload(Machine(cores=1, available_bytes=0), fewer, "generator", 100, 2 << 30)
    with pytest.raises(ConfigError, match=r"generator=6: 4 more processes of about 2048 MiB each do not fit into 6553"):
        refuse_overload(SMALL, WANTED, "generator", 6, 2 << 30)


def test_a_run_file_needs_cores_and_memory_for_its_processes() -> None:
    run: dict[str, Any] = {"name": "r", "folder": "r", "model": {"path": "recipe:countdown"}}
    run["generator"] = {"replicas": 6, "device": "cpu"}
    config = validate_run_config(run, "test")
    check_configured(config, Machine(cores=1, available_bytes=4 << 30))
    with pytest.raises(ConfigError, match=r"generator.replicas=6: .* starts 8 service processes, which need \d+ MiB;"):
        check_configured(config, Machine(cores=1, available_bytes=1 << 30))
    crowded = validate_run_config({**run, "generator": {"replicas": 7}}, "test")
    with pytest.raises(ConfigError, match=r"starts 9 service processes, more than 8, 8 for each of the 1 cores"):
        check_configured(crowded, Machine(cores=1, available_bytes=4 << 30))


def process(tmp_path: Path, groups: str, mounts: list[str], files: Mapping[str, str], root: str = "/") -> Path:
    """A process with these groups and mounts; ``files`` are below the folder of all mounts."""
    fs = tmp_path / "cgroup"
    for name, text in files.items():
        (fs / name).parent.mkdir(parents=True, exist_ok=True)
        (fs / name).write_text(text)
    proc = tmp_path / "proc"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(groups)
    shown = ["23 1 8:1 / / rw - ext4 /dev/root rw", *(mount.format(fs=fs, root=root) for mount in mounts)]
    (proc / "mountinfo").write_text("\n".join(shown) + "\n")
    return proc


def memory_v2(folder: str, limit: str, usage: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"{folder}memory.max": f"{limit}\n",
        f"{folder}memory.current": f"{usage}\n",
        f"{folder}memory.stat": f"anon 1024\ninactive_file {inactive}\nactive_file 7\n",
    }


def memory_v1(folder: str, limit: str, usage: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"memory/{folder}memory.limit_in_bytes": limit,
        f"memory/{folder}memory.usage_in_bytes": f"{usage}\n",
        f"memory/{folder}memory.stat": f"cache 4096\ninactive_file 1\ntotal_inactive_file {inactive}\n",
    }


def test_a_container_with_v2_has_its_own_limits_at_the_root(tmp_path: Path) -> None:
    files = {**memory_v2("", str(GIB), 300 << 20, 100 << 20), "cpu.max": "150000 100000\n"}
    proc = process(tmp_path, "0::/\n", [V2], files)
    assert available_memory(proc) == GIB - (200 << 20)
    assert cpu_quota(proc) == 1.5


def test_a_group_without_statistics_has_a_limit_and_a_mount_without_a_source_is_passed_over(tmp_path: Path) -> None:
    """As in gVisor; ``mount -t tmpfs "" /x`` shows two spaces."""
    files = memory_v2("", str(GIB), 300 << 20)
    del files["memory.stat"]
    proc = process(tmp_path, "0::/\n", ["30 23 0:27 / /x rw - tmpfs  rw", V2], files)
    assert available_memory(proc) == GIB - (300 << 20)


def test_the_lowest_limit_of_all_groups_above_counts(tmp_path: Path) -> None:
    files = {
        **memory_v2("user.slice/", str(2 * GIB), GIB),
        **memory_v2("user.slice/a.scope/", "max", 5 << 20),
        "user.slice/cpu.max": "max 100000\n",
        "user.slice/a.scope/cpu.max": "50000 100000\n",
        "cgroup.controllers": "cpu memory\n",
    }
    proc = process(tmp_path, "0::/user.slice/a.scope\n", [V2], files)
    assert available_memory(proc) == GIB
    assert cpu_quota(proc) == 0.5


@pytest.mark.parametrize(
    ("root", "path", "folder"),
    [
        ("/", "/docker/4e1", "docker/4e1/"),  # on the machine itself
        ("/docker/4e1", "/docker/4e1", ""),  # in a container, without a namespace of groups
        ("/", "/", ""),  # in a container, with one
        ("/docker/4e1", "/elsewhere", ""),
    ],
)
def test_v1_is_read_where_its_mount_shows_the_group(tmp_path: Path, root: str, path: str, folder: str) -> None:
    files = {
        **memory_v1(folder, f"{GIB}\n", 400 << 20, 100 << 20),
        f"cpu,cpuacct/{folder}cpu.cfs_quota_us": "200000\n",
        f"cpu,cpuacct/{folder}cpu.cfs_period_us": "100000\n",
    }
    proc = process(tmp_path, GROUPS_V1.format(path=path), [V1_MEMORY, V1_CPU, UNIFIED], files, root)
    assert available_memory(proc) == GIB - (300 << 20)
    assert cpu_quota(proc) == 2.0


def test_a_machine_without_limits_has_none(tmp_path: Path) -> None:
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}
    proc = process(tmp_path, GROUPS_V1.format(path="/"), [V1_MEMORY, V1_CPU, UNIFIED], files)
    assert available_memory(proc) is None
    assert cpu_quota(proc) is None
    assert available_memory(tmp_path / "nowhere") is None
    unlimited = process(tmp_path / "v1", GROUPS_V1.format(path="/"), [V1_MEMORY], memory_v1("", V1_UNLIMITED, GIB))
    assert (available_memory(unlimited) or 0) > 1 << 60


def test_a_group_that_is_over_its_limit_allows_nothing(tmp_path: Path) -> None:
    assert available_memory(process(tmp_path, "0::/\n", [V2], memory_v2("", str(GIB), GIB + 4096))) == 0
