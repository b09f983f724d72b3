"""Policy folders read without torch; calls in slots."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from rollmesh.errors import EngineError
from rollmesh.generator.engines.call_limits import Backlog
from rollmesh.generator.engines.policy_folders import difference, read_folder
from rollmesh.generator.engines.sglang.engine_state import ServerCall, SlotQueue
from rollmesh.types import GenerationCall, SamplingParams

SHAPES = {"model.embed_tokens.weight": [50, 8], "model.norm.weight": [8]}


def write_folder(folder: Path, shapes: dict[str, list[int]] | None = None, **config: object) -> Path:
    folder.mkdir()
    fields = {"vocab_size": 50, "max_position_embeddings": 64, "hidden_size": 8, "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps({**fields, **config}))
    header, at = {}, 0
    for name, shape in (SHAPES if shapes is None else shapes).items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return folder


def test_a_folder_tells_its_sizes_and_its_tensors(tmp_path):
    found = read_folder(write_folder(tmp_path / "a"))
    assert (found.vocab_size, found.max_positions) == (50, 64)
    assert found.tensors == {name: tuple(shape) for name, shape in SHAPES.items()}
    assert difference(found, read_folder(write_folder(tmp_path / "b"))) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "hidden_size is 16, the running policy has 8"),
        ({"rope_theta": 1e6}, "rope_theta is 1000000.0, the running policy has None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, the running policy has None"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu, the running policy has None"),
        ({"shapes": {"model.norm.weight": [8]}}, "no tensor model.embed_tokens.weight"),
        ({"shapes": {**SHAPES, "model.norm.weight": [7]}}, r"shape \[7\], the running policy has \[8\]"),
        ({"shapes": {**SHAPES, "lm_head.weight": [50, 8]}}, "tensor lm_head.weight, which"),
    ],
)
def test_another_architecture_is_told_by_its_first_difference(tmp_path, changes, message):
    running = read_folder(write_folder(tmp_path / "a"))
    assert re.search(message, difference(running, read_folder(write_folder(tmp_path / "b", **changes))))


def test_rope_scaling_and_rope_parameters_that_differ_are_refused(tmp_path):
    linear = {"rope_type": "linear", "factor": 2.0}
    both = write_folder(tmp_path / "a", rope_scaling=linear, rope_parameters={"rope_type": "default"})
    with pytest.raises(EngineError, match="rope_scaling=.*rope_parameters=.*keep one of them"):
        read_folder(both)
    read_folder(write_folder(tmp_path / "b", rope_scaling=linear, rope_parameters=linear))


def test_damaged_folders_are_engine_errors(tmp_path):
    folder = write_folder(tmp_path / "a")
    data = (folder / "model.safetensors").read_bytes()
    for damaged in (data[:-1], data + b"x", data[:5], b"\xff" * 100, struct.pack("<Q", 4) + b"nope"):
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(EngineError, match=r"model\.safetensors cannot be read"):
            read_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="no \\*\\.safetensors"):
        read_folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(EngineError, match="expected a JSON object"):
        read_folder(folder)


def make_server_call(name: str = "t") -> ServerCall:
    call = GenerationCall(
        trajectory_id=name,
        context_ids=np.arange(5, dtype=np.int32),
        prompt_token_count=5,
        max_new_token_count=9,
        sampling=SamplingParams(),
        chunk_token_count=4,
    )
    return ServerCall(call=call, budget=9, backlog=Backlog.of(call), context=call.context_ids.tolist())


def test_slots_go_out_in_order_of_arrival_and_are_kept_until_the_call_leaves():
    queue = SlotQueue(2)
    first, second, third = (make_server_call(n) for n in "abc")
    for server_call in (first, second, third):
        queue.enter(server_call)
    assert not queue.take(second)
    assert queue.take(first) and queue.take(second) and not queue.take(third)
    assert (queue.running_count, queue.waiting_count, queue.context_tokens) == (2, 1, 10)
    third.changed.clear()
    queue.leave(first)
    assert third.changed.is_set() and queue.take(third)
    assert first.running is False and list(queue) == [second, third]
    queue.leave(second)
    queue.leave(third)
    assert (queue.running_count, queue.waiting_count) == (0, 0)


def test_a_call_that_leaves_the_queue_lets_the_next_one_in():
    queue = SlotQueue(1)
    first, second = make_server_call("a"), make_server_call("b")
    queue.enter(first)
    queue.enter(second)
    queue.leave(first)
    assert second.changed.is_set() and queue.take(second)


def test_time_counts_only_while_something_is_decoded():
    queue = SlotQueue(2)
    server_call = make_server_call()
    queue.account()
    assert queue.busy_seconds == 0
    queue.enter(server_call)
    queue.take(server_call)
    queue.set_paused(True)
    before = queue.busy_seconds
    queue.account()
    assert queue.busy_seconds == before
    queue.set_paused(False)
    queue.account()
    assert queue.busy_seconds >= before and queue.running_seconds == queue.busy_seconds


def test_the_oldest_version_in_a_cache_never_exceeds_the_one_that_samples():
    server_call = make_server_call()
    server_call.kv_min = {3: 3, 4: 3, 5: 5}
    assert [server_call.kv_min_version(v) for v in (3, 4, 5, 6)] == [3, 3, 5, 6]
    assert not server_call.begun
    server_call.context.append(1)
    assert server_call.begun
