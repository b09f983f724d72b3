"""The embedded engine: what waits is packed together, whichever call it is of; and the share of its time with work."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen2Config

from rollmesh.errors import EngineError
from rollmesh.runtime.metrics import Metrics
from rollmesh.teacher.embedded_engine import EmbeddedEngine
from rollmesh.teacher.teacher_engine import ScoreRequest
from rollmesh.teacher.teacher_service import TeacherMetrics
from rollmesh.trainer.learner.policy_scorer import PolicyScorer, ResponseScores
from rollmesh.types import Int32Array

from ...kit.models import write_model

VOCAB, PROMPT = 64, 120
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class HeldScorer(PolicyScorer):
    """A scorer whose passes wait for the test."""

    go = threading.Event()
    begun = threading.Event()
    failure: Exception | None = None

    def response_scores(
        self, sequences: list[Int32Array], prompt_token_counts: list[int], temperature: float, top_k: int
    ) -> list[ResponseScores]:
        self.sizes.append(len(sequences))
        self.begun.set()
        self.go.wait()
        if self.failure is not None:
            raise self.failure
        return super().response_scores(sequences, prompt_token_counts, temperature, top_k)


@pytest.fixture
def scorer(tmp_path: Path) -> HeldScorer:
    config = Qwen2Config(**SIZES, num_key_value_heads=1, vocab_size=VOCAB, max_position_embeddings=256)
    made = HeldScorer.from_folder(write_model(tmp_path, config), device="cpu", tokens_per_microbatch=512)
    made.share_prefixes(256)
    made.sizes, made.go, made.begun = [], threading.Event(), threading.Event()
    return made


def member(number: int, temperature: float = 1.0) -> ScoreRequest:
    """One of a group whose prompt is shared."""
    prompt = np.arange(PROMPT) % VOCAB
    answer = np.random.default_rng(number).integers(0, VOCAB, 20)
    ids = np.concatenate([prompt, answer]).astype(np.int32)
    return ScoreRequest(token_ids=ids, prompt_token_count=PROMPT, temperature=temperature, top_k=2)


async def test_sequences_of_all_calls_gather_while_a_pass_runs_and_share_their_beginning(scorer: HeldScorer) -> None:
    engine = EmbeddedEngine(scorer, 512)
    async with engine.running():
        first = asyncio.create_task(engine.score(member(0)))
        await asyncio.to_thread(scorer.begun.wait)
        others = [asyncio.create_task(engine.score(member(n))) for n in range(1, 9)]
        gone, warm = asyncio.create_task(engine.score(member(9))), asyncio.create_task(engine.score(member(10, 0.5)))
        await asyncio.sleep(0)
        gone.cancel()
        scorer.go.set()
        scores = await asyncio.gather(first, *others, warm)
    # 8 members have 8 * 140 tokens, and 280 where their beginning is computed once: one pass of 512.
    assert scorer.sizes == [1, 8, 1]
    for number, scored in enumerate(scores[:-1]):
        alone = scorer.logprobs([member(number).token_ids])[0][PROMPT - 1 :]
        np.testing.assert_allclose(scored.logprobs, alone, rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        scores[-1].logprobs, scorer.logprobs([member(10).token_ids], 0.5)[0][PROMPT - 1 :], rtol=0, atol=1e-5
    )


async def test_an_error_of_the_model_fails_what_waits_and_the_engine(scorer: HeldScorer) -> None:
    engine, scorer.failure = EmbeddedEngine(scorer, 512), RuntimeError("a broken device")
    scorer.go.set()
    async with engine.running():
        with pytest.raises(EngineError, match="the teacher's model failed: RuntimeError..a broken device"):
            await engine.score(member(0))
        with pytest.raises(EngineError, match="a broken device"):
            await engine.score(member(1))
        assert engine.failed.done()


def test_time_with_several_sequences_counts_once_and_while_they_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    exported = Metrics("teacher")
    metrics = TeacherMetrics(exported, "large")

    def busy() -> float | None:
        return exported.registry.get_sample_value("rollmesh_teacher_busy_seconds_total", {"teacher": "large"})

    assert busy() == 0
    now = 103.0
    with metrics.sequence():
        now = 105.0
        with metrics.sequence():
            now = 109.0
        assert busy() == 6  # from 103 to 109, though the first one has not ended
        now = 110.0
        metrics.note_busy()
        assert busy() == 7  # of a sequence that is still there
    now = 150.0
    with metrics.sequence():
        assert busy() == 7
