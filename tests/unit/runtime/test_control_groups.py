"""Limits of control groups, read from the files that the kernel writes for v1, v2 and both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rollmesh.runtime.capacity import available_memory, cpu_quota

GIB = 1 << 30
V2 = "31 23 0:28 / {fs} ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate"
V1_MEMORY = "35 31 0:32 {root} {fs}/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 {root} {fs}/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct"
UNIFIED = "41 31 0:38 / {fs}/unified rw,relatime - cgroup2 cgroup2 rw"
V1_UNLIMITED = "9223372036854771712\n"


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


GROUPS_V1 = "9:name=systemd:/\n4:memory:{path}\n1:cpu,cpuacct:{path}\n0::/\n"


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
