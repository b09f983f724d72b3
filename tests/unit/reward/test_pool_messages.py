"""The pool of workers without processes: its spec, frames, uids, and retries after a death."""

import asyncio
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.config.run import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.reward.confinement import WorkerConfinement
from rollmesh.reward.messages import FrameError, WorkerSpec, frame, read_frame, receive_frame, worker_spec
from rollmesh.reward.reward_metrics import RewardMetrics
from rollmesh.reward.reward_service import Scoring
from rollmesh.reward.worker_pool import WorkerDied
from rollmesh.runtime.metrics import Metrics
from rollmesh.tasks.sandbox.identity import SLOTS_PER_PROCESS
from rollmesh.tasks.verifiers.verifier_protocol import BUILT_IN
from rollmesh.types import OutcomeKind, RewardOutcome
from rollmesh.wire.reward_messages import outcome_to_bytes

from ...kit.run_files import made_run

TABLE = {"type": "jsonl", "path": "a.jsonl"}
GYM = {"type": "reasoning_gym", "task": "chain_sum"}


def run_config(folder: Path, data: dict[str, Any], verifier: str) -> RunConfig:
    (folder / "config.json").write_text("{}")
    reward = {"verifier": verifier, "options": {"tolerance": 0.5} if verifier == "numeric" else {}}
    return made_run(folder / "run", model={"path": str(folder)}, data=data, reward=reward)


@pytest.mark.parametrize(
    ("data", "verifier", "required", "optional"),
    [
        ({"source": TABLE}, "numeric", (), ()),
        ({"source": {"type": "countdown"}}, "countdown", (), ()),
        ({"source": {"type": "countdown"}}, "numeric", ("countdown",), ()),
        ({"source": GYM}, "numeric", ("reasoning_gym",), ()),
        ({"source": TABLE, "evaluation_source": GYM}, "numeric", ("reasoning_gym",), ()),
        (
            {"source": {**TABLE, "verifier_field": "by"}, "evaluation_source": GYM},
            "numeric",
            ("reasoning_gym",),
            tuple(sorted(set(BUILT_IN) - {"regex", "http_judge", "composite", "numeric", "reasoning_gym"})),
        ),
    ],
)
def test_a_run_loads_the_verifiers_that_its_prompts_can_name(
    tmp_path: Path, data: dict[str, Any], verifier: str, required: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    spec = worker_spec(run_config(tmp_path, data, verifier))
    assert (spec.required_verifiers, spec.optional_verifiers) == (required, optional)


def test_a_spec_survives_its_way_to_the_template(tmp_path: Path) -> None:
    spec = worker_spec(run_config(tmp_path, {"source": GYM}, "numeric"))
    assert WorkerSpec.from_json(spec.to_json()) == spec
    assert spec.default_options == {"tolerance": 0.5}
    assert spec.tokenizer_folder == str(tmp_path)


def test_a_model_folder_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    config = run_config(tmp_path, {"source": TABLE}, "exact")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.path"):
        worker_spec(config)


@given(st.lists(st.binary(max_size=64)), st.lists(st.integers(1, 9)))
async def test_frames_come_out_whole_however_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    data, stream = b"".join(map(frame, payloads)), asyncio.StreamReader()
    for size in cuts:
        stream.feed_data(data[:size])
        data = data[size:]
    stream.feed_data(data)
    stream.feed_eof()
    assert [await read_frame(stream, 64) for _ in payloads] == payloads
    with pytest.raises(EOFError):
        await read_frame(stream, 64)


async def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    stream = asyncio.StreamReader()
    stream.feed_data(frame(b"x" * 65)[:4])
    with pytest.raises(FrameError, match="frame of 65 bytes, the limit is 64"):
        await read_frame(stream, 64)


def received(data: bytes, largest_bytes: int = 10) -> list[bytes | None]:
    """Frames that a peer receives up to the end."""
    stream = io.BytesIO(data)
    found = [receive_frame(stream, largest_bytes)]
    while found[-1] is not None:
        found.append(receive_frame(stream, largest_bytes))
    return found


def test_a_stream_gives_frames_then_the_end() -> None:
    assert received(frame(b"one") + frame(b"")) == [b"one", b"", None]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (frame(b"three")[:2], "ended inside a frame"),
        (frame(b"three")[:6], "ended inside a frame"),
        (frame(b"too long for it"), "the limit is 10"),
    ],
)
def test_a_torn_or_large_frame_is_an_error(data: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        received(data)


SEPARATE = WorkerConfinement(own_uids=True, owner_pid=7, memory_limit_bytes=1 << 26)
SHARED = WorkerConfinement(own_uids=False, owner_pid=7, memory_limit_bytes=1 << 26)


def test_a_birth_skips_the_uids_of_living_workers() -> None:
    assert SEPARATE.free_birth(3, [0, 1, 2]) == 3
    assert SEPARATE.free_birth(SLOTS_PER_PROCESS, [0, 1, 9]) == SLOTS_PER_PROCESS + 2
    assert SEPARATE.free_birth(SLOTS_PER_PROCESS + 9, [0, 1, 9]) == SLOTS_PER_PROCESS + 10
    with pytest.raises(RuntimeError, match="all 256 uids of this template have a living worker"):
        SEPARATE.free_birth(SLOTS_PER_PROCESS, range(SLOTS_PER_PROCESS))
    assert SHARED.free_birth(SLOTS_PER_PROCESS, range(SLOTS_PER_PROCESS)) == SLOTS_PER_PROCESS


def test_one_uid_is_left_for_the_worker_that_takes_the_place_of_a_dying_one() -> None:
    assert SEPARATE.most_workers() == SLOTS_PER_PROCESS - 1
    assert SHARED.most_workers() is None


class DyingPool:
    """Its workers die of one cause after the other, then one answers."""

    timeout_means_wrong: ClassVar[Mapping[str, bool]] = {}

    def __init__(self, deaths: list[WorkerDied]) -> None:
        self.deaths = deaths

    async def run(self, payload: bytes, timeout_seconds: float) -> bytes:
        if self.deaths:
            raise self.deaths.pop(0)
        return outcome_to_bytes(RewardOutcome(kind=OutcomeKind.SCORED, value=1.0))


def scoring_with(*deaths: WorkerDied) -> Scoring:
    return Scoring(
        DyingPool(list(deaths)),  # type: ignore[arg-type]
        {},
        RewardMetrics(Metrics("reward")),
        default_verifier="exact",
        timeout_seconds=1.0,
        on_unusable_verifier=lambda error: None,
    )


def alone() -> WorkerDied:
    return WorkerDied("killed by signal 9")


def together() -> WorkerDied:
    return WorkerDied("the process that started it has ended", with_template=True)


@pytest.mark.parametrize(
    ("deaths", "kind"),
    [
        ([alone()], OutcomeKind.SCORED),
        ([alone(), alone()], OutcomeKind.VERIFIER_ERROR),
        # The next worker was one of the same template, and just as dead.
        ([together(), together()], OutcomeKind.SCORED),
        ([together(), alone(), together()], OutcomeKind.SCORED),
        # An answer that ends every template is no reason to go on for ever.
        ([together() for _ in range(9)], OutcomeKind.VERIFIER_ERROR),
    ],
)
async def test_a_death_with_the_template_is_not_held_against_the_answer(
    deaths: list[WorkerDied], kind: OutcomeKind
) -> None:
    assert (await scoring_with(*deaths).score("", b"")).kind is kind


async def test_a_log_line_about_an_answer_is_short_whatever_the_caller_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = await scoring_with(alone(), alone()).score("x" * 100_000, b"")
    assert outcome.kind is OutcomeKind.VERIFIER_ERROR
    assert "answer_without_value" in (line := capsys.readouterr().out)
    assert len(line) < 2_000
