"""Imports without collections in between, and processes that end without a last one."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from rollmesh.runtime.lifecycle import many_imports

CYCLE_AT_THE_END = """
import sys
from rollmesh.runtime.lifecycle import own_process

class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        print("collected")

if "own" in sys.argv:
    own_process()
Cycle()
"""


def test_nothing_is_collected_during_imports_and_the_collector_works_again_afterwards() -> None:
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    with pytest.raises(ImportError), many_imports():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen, "the garbage of another program's process stays"


def test_a_disabled_collector_stays_off() -> None:
    gc.disable()
    try:
        with many_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(("arguments", "collected"), [([], True), (["own"], False)])
def test_a_rollmesh_process_ends_without_a_garbage_collection(arguments: list[str], collected: bool) -> None:
    command = [sys.executable, "-c", CYCLE_AT_THE_END, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("collected" in done.stdout) is collected


def test_the_sglang_engine_is_imported_without_torch_and_without_sglang():
    code = (
        "import sys, rollmesh.generator.engines.sglang.sglang_engine, rollmesh.generator.engines;"
        "assert not {'torch', 'transformers', 'sglang'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
