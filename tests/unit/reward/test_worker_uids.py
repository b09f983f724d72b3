"""Uids of workers: none is shared while both workers live."""

from __future__ import annotations

import pytest

from rollmesh.reward.confinement import WorkerConfinement
from rollmesh.tasks.sandbox.identity import SLOTS_PER_PROCESS

SEPARATE = WorkerConfinement(own_uids=True, owner_pid=7, memory_limit_bytes=1 << 26)
SHARED = WorkerConfinement(own_uids=False, owner_pid=7, memory_limit_bytes=1 << 26)


def test_a_birth_skips_the_uids_of_living_workers() -> None:
    assert SEPARATE.free_birth(3, [0, 1, 2]) == 3
    assert SEPARATE.free_birth(SLOTS_PER_PROCESS, [0, 1, 9]) == SLOTS_PER_PROCESS + 2
    assert SEPARATE.free_birth(SLOTS_PER_PROCESS + 9, [0, 1, 9]) == SLOTS_PER_PROCESS + 10


def test_a_birth_without_a_free_uid_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="all 256 uids of this template have a living worker"):
        SEPARATE.free_birth(SLOTS_PER_PROCESS, range(SLOTS_PER_PROCESS))


def test_one_uid_is_left_for_the_worker_that_takes_the_place_of_a_dying_one() -> None:
    assert SEPARATE.most_workers() == SLOTS_PER_PROCESS - 1


def test_workers_that_share_a_uid_may_be_any_number() -> None:
    assert SHARED.most_workers() is None
    assert SHARED.free_birth(SLOTS_PER_PROCESS, range(SLOTS_PER_PROCESS)) == SLOTS_PER_PROCESS
