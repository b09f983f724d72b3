"""Facts that the SGLang engine relies on, checked on the real server: a version with another behaviour fails here."""

from concurrent.futures import Future

import pytest

from ..kit.generation import VOCAB
from .contract_kit import POSITIONS
from .served import ATTEMPTS, LONG, PROMPT, TOLERANCE, Answer, Served

pytestmark = pytest.mark.parametrize("endpoint", ["sglang-overlap"], indirect=True)


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.5), (1.0, 0.5), (1.5, 1.0), (0.0, 1.0)]
)
def test_a_logprob_is_of_the_tempered_distribution_over_the_whole_vocabulary(
    served: Served, temperature: float, top_p: float
) -> None:
    answer = served.generate(PROMPT, 64, temperature=temperature, top_p=top_p)
    raw = answer.gap(served.policies.logprobs(0, answer.ids))
    tempered = answer.gap(served.policies.logprobs(0, answer.ids, temperature or 1.0))
    assert tempered <= TOLERANCE
    assert raw <= TOLERANCE if temperature in (0.0, 1.0) else raw > 0.01


def test_a_sampling_mask_has_the_tokens_of_a_draw_and_the_logprob_over_them(served: Served) -> None:
    """Top-k and top-p both of the whole distribution, then min-p: joint, as no other server has it."""
    params = {"temperature": 1.3, "top_p": 0.7, "top_k": 6, "min_p": 0.25}
    answer = served.generate(PROMPT, 64, masked=True, **params)
    masks, logprobs = (answer.meta[f"output_token_sampling_{name}"] for name in ("mask", "logprobs"))
    expected = served.policies.logprobs(0, answer.ids, params["temperature"])[len(PROMPT) - 1 :]
    assert len(masks) == len(logprobs) == 64
    for token, mask, logprob, row in zip(answer.tokens, masks, logprobs, expected, strict=False):
        probabilities = row.double().exp().sort(descending=True)
        before = probabilities.values.cumsum(0) - probabilities.values
        kept = (before <= 0.7) & (probabilities.values >= 0.25 * probabilities.values[0])
        assert mask == probabilities.indices[:6][kept[:6]].tolist(), "falling, most likely first"
        assert token in mask
        assert abs(logprob - (row[token] - row[mask].logsumexp(0)).item()) <= TOLERANCE


def test_a_sampling_mask_needs_a_top_k_within_the_server_s_bound(served: Served) -> None:
    for top_k in (-1, 4097):
        refused = served.send(PROMPT, 4, masked=True, top_p=0.9, top_k=top_k)
        assert refused.status_code == 400 and "--sampling-mask-max-tokens" in refused.text
    answer = served.generate(PROMPT, 4, masked=True, top_p=0.9, top_k=4096)
    assert len(answer.meta["output_token_sampling_mask"]) == 4


def test_prompt_logprobs_come_without_generating(served: Served) -> None:
    body = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 0}
    response = served.post("/generate", **body, sampling_params={"max_new_tokens": 0, "temperature": 1.0}).json()
    entries = response["meta_info"]["input_token_logprobs"]
    expected = served.policies.logprobs(0, PROMPT)
    assert response["output_ids"] == []
    assert [entry[1] for entry in entries] == PROMPT and entries[0][0] is None
    assert all(abs(entries[i][0] - expected[i - 1, PROMPT[i]].item()) <= TOLERANCE for i in range(1, len(PROMPT)))


def test_the_stop_token_is_in_the_answer_with_its_logprob(served: Served) -> None:
    whole = served.generate(PROMPT, 12, temperature=0.0)
    stop = whole.tokens[4]
    answer = served.generate(PROMPT, 12, temperature=0.0, ignore_eos=False, stop_token_ids=[stop])
    assert answer.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
    assert len(answer.logprobs) == len(answer.tokens)
    assert answer.meta["finish_reason"] == {"type": "stop", "matched": stop}


def test_slices_of_a_greedy_answer_are_the_answer_and_come_from_the_cache(served: Served) -> None:
    whole = served.generate(PROMPT, 64, temperature=0.0)
    tokens: list[int] = []
    for _ in range(4):
        part = served.generate(PROMPT + tokens, 16, temperature=0.0, extra_key="slices")
        # The last token of a context is computed again, and so is the last one sampled: it was not an input yet.
        assert part.cached_token_count >= len(PROMPT + tokens) - 2 or not tokens
        tokens += part.tokens
    assert tokens == whole.tokens


def test_an_extra_key_keeps_a_prefix_cache_of_its_own(served: Served) -> None:
    prompt = [20 + i % 40 for i in range(96)]
    hits = [served.generate(prompt, 1, extra_key=key).cached_token_count for key in ("5", "5", "6", "6", None)]
    assert hits == [0, 95, 0, 95, 0]


def test_running_requests_change_weights_exactly_where_their_spans_say(served: Served) -> None:
    """Retract, load, flush: every token's logprob is that of the one model that its span names."""
    futures = next(futures for futures in served.attempts(16) if swapped_twice(served, futures))
    answers = [future.result() for future in futures]
    assert served.version() == "2"
    for answer in answers:
        assert [span[0] for span in answer.spans] == [0, 1, 2]
        assert [span[1] for span in answer.spans] + [LONG] == [0] + [span[2] for span in answer.spans]
        for version, start, end in answer.spans:
            assert answer.gap(served.policies.logprobs(version, answer.ids), start, end) <= TOLERANCE


def swapped_twice(served: Served, futures: list[Future[Answer]]) -> bool:
    """Load versions 1 and 2 under requests; False as soon as one of these has ended."""
    for version in (1, 2):
        if not served.pause_running(futures, "retract"):
            return False
        assert served.load(version).status_code == 200
        served.resume()
        if not served.wait_running(futures):
            return False
    return True


def test_a_flush_that_cannot_happen_loads_the_weights_and_says_that_it_failed(served: Served) -> None:
    """Reason for flush_cache=false in keep_kv: otherwise the server and its requests name different versions."""
    (future,) = served.paused_under(1, "in_place")
    assert served.load(1).status_code == 400
    served.resume()
    assert [version for version, _, _ in future.result().spans] == [0, 1]
    assert served.version() == "0"


def test_an_abort_ends_its_request_with_what_it_has_and_an_unknown_one_nothing(served: Served) -> None:
    for _ in range(ATTEMPTS):
        answer = aborted(served)
        if answer.finish == "abort":
            break
        # It came to its end before this process had sent the other abort, or its own.
        assert answer.finish == "length"
    assert answer.finish == "abort"
    assert 0 < len(answer.tokens) < LONG and len(answer.logprobs) == len(answer.tokens)
    assert answer.gap(served.policies.logprobs(0, answer.ids)) <= TOLERANCE


def aborted(served: Served) -> Answer:
    """Answer to a long request that is aborted after another abort, of an unknown request, has not ended it."""
    rid = "a" * 32
    future = served.start(PROMPT, LONG, rid=rid)
    served.wait_running([future])
    assert served.post("/abort_request", rid="b" * 32).status_code == 200
    if served.wait_running([future]):
        assert served.post("/abort_request", rid=rid).status_code == 200
    else:
        assert future.result().finish == "length"
    return future.result()


def test_a_paused_server_lives_but_is_not_ready_and_holds_what_it_is_sent(served: Served) -> None:
    served.pause("retract")
    assert served.get("/ready").status_code == 503
    assert served.get("/model_info").status_code == 200
    future = served.start(PROMPT, 4)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.5)
    served.resume()
    assert len(future.result().tokens) == 4
    assert served.get("/ready").status_code == 200


def test_a_folder_without_weights_is_refused_and_the_old_ones_serve_on(served: Served) -> None:
    refused = served.post("/update_weights_from_disk", model_path="/nowhere", weight_version="9")
    assert refused.status_code == 400 and refused.json()["success"] is False
    assert served.version() == "0"
    answer = served.generate(PROMPT, 16)
    assert answer.spans == [(0, 0, 16)]
    assert answer.gap(served.policies.logprobs(0, answer.ids)) <= TOLERANCE


@pytest.mark.parametrize(
    ("prompt", "count"),
    [([], 1), ([20] * (POSITIONS + 1), 1), ([20] * POSITIONS, 1), ([20] * (POSITIONS - 8), 9)],
    ids=["no token", "too long", "no room", "too many"],
)
def test_a_request_that_cannot_fit_is_refused_with_400(served: Served, prompt: list[int], count: int) -> None:
    refused = served.send(prompt, count)
    assert refused.status_code == 400 and "error" in refused.json()
    assert served.send([VOCAB - 1] * (POSITIONS - 8), 8).status_code == 200
