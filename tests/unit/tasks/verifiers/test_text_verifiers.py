"""Exact, numeric, choice, regex, composite: what is right, what is wrong, and what is an error."""

import math
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.errors import ConfigError, VerifierError
from rollmesh.tasks.verifiers.extraction import make_extractor
from rollmesh.tasks.verifiers.verifier_protocol import BUILT_IN, RewardParts, build_verifier, checked_reward


def score(name: str, response: str, answer: Any, **options: Any) -> float:
    return checked_reward(build_verifier(name, options).verify(response, {"answer": answer}), name).value


@pytest.mark.parametrize(
    ("how", "response", "found"),
    [
        ("whole", "  a b \n", "a b"),
        ("last_line", "one\ntwo\n\n", "two"),
        ("last_line", " \n ", None),
        ("last_number", "from 3 to -1,234.5e2 apples", "-1,234.5e2"),
        ("last_number", "it is 3/4.", "3/4"),
        ("last_number", "no digits", None),
        ("boxed", r"so \boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{never closed", None),
        ("boxed", "nothing", None),
        ("boxed", r"\boxed{4}, or was it \boxed{", "4"),
        ("boxed", r"\boxed{\boxed{5}}", "5"),
        ("boxed", r"\boxed{1} and \boxed{\left\{2\right.}", r"\left\{2\right."),
        ("boxed", r"\boxed{1}, \left\{ so \boxed {2}", "2"),
        ("boxed", "\\boxed{1} or\n\\fbox\n{2}", "2"),
        ("tag:answer", "<answer>4</answer> and a stray </answer>", "4"),
        ("tag:answer", "<answer>a</answer> then <answer> b </answer>", "b"),
        ("tag:answer", "<answer>open", None),
        ("tag:answer", "closed</answer>", None),
        ("after:####", "x #### 41\n#### 42 \nrest", "42"),
        ("after:####", "no mark", None),
    ],
)
def test_the_answer_is_found_at_its_place(how: str, response: str, found: str | None) -> None:
    assert make_extractor(how)(response) == found


@pytest.mark.parametrize("how", ["", "boxes", "tag:", "after:", "tag"])
def test_an_unknown_place_is_refused(how: str) -> None:
    with pytest.raises(ConfigError, match="extract: "):
        make_extractor(how)


@pytest.mark.parametrize(
    ("response", "answer", "options", "expected"),
    [
        ("Paris", "Paris", {}, 1.0),
        (" Paris \n", "Paris", {}, 1.0),
        ("paris", "Paris", {}, 0.0),
        ("paris", "Paris", {"ignore_case": True}, 1.0),
        ("New  York", "New York", {}, 1.0),
        ("Rome", ["Paris", "Rome"], {}, 1.0),
        ("", "Paris", {}, 0.0),
        ("42", 42, {}, 1.0),
        ("42", 42.0, {}, 1.0),
        ("4.5", 4.5, {}, 1.0),
        ("0.0000025", 2.5e-6, {}, 1.0),
        ("100000000000000000000000", 1e23, {}, 1.0),
        ("so <answer>b</answer>", "b", {"extract": "tag:answer"}, 1.0),
        ("b", "b", {"extract": "tag:answer"}, 0.0),
    ],
)
def test_exact(response: str, answer: Any, options: dict[str, Any], expected: float) -> None:
    assert score("exact", response, answer, **options) == expected


@pytest.mark.parametrize(
    ("response", "answer", "options", "expected"),
    [
        ("the answer is 42", 42, {}, 1.0),
        ("the answer is 42.", "42", {}, 1.0),
        ("1,234", 1234, {}, 1.0),
        ("41 or 42", 42, {}, 1.0),
        ("42 or 41", 42, {}, 0.0),
        ("0.3333333", "1/3", {}, 1.0),
        ("0.333", "1/3", {}, 0.0),
        ("0.333", "1/3", {"tolerance": 0.01}, 1.0),
        ("1/0", 1, {}, 0.0),
        ("5", "first 3, then\n#### 5", {}, 1.0),
        ("100000000000000000001", "100000000000000000002", {"tolerance": 0}, 0.0),
        ("1e400", "1e400", {}, 1.0),
        ("1e400", "1e401", {}, 0.0),
        ("nothing", 1, {}, 0.0),
        ("9" * 5000, 9, {}, 0.0),
        (r"\boxed{7} not 8", 7, {"extract": "boxed"}, 1.0),
        ("0.0000000001", 0, {}, 1.0),
        ("9.1e-31", 1.6e-19, {}, 0.0),
        ("1.60000001e-19", 1.6e-19, {}, 1.0),
        ("0.0000000001", 0.0000000002, {}, 0.0),
        ("0.0000000001", 0.0000000002, {"absolute_tolerance": 1e-9}, 1.0),
        ("2.5e-6", 2.5e-6, {}, 1.0),
        ("0.01", 0, {}, 0.0),
    ],
)
def test_numeric(response: str, answer: Any, options: dict[str, Any], expected: float) -> None:
    assert score("numeric", response, answer, **options) == expected


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("(1,2)", 12, 0.0),
        ("(1,2)", 2, 0.0),
        ("1, 2", 2, 1.0),
        ("1,23", 123, 0.0),
        ("1,234,567", 1234567, 1.0),
        ("1.2.3", 0.3, 0.0),
        ("3-6", -6, 0.0),
        ("3-6", 6, 1.0),
        ("x-6", -6, 0.0),
        ("(2)-6", -6, 0.0),
        ("3 - 6", -6, 0.0),
        ("x = -6", -6, 1.0),
        ("[-6]", -6, 1.0),
        ("\u22126", -6, 1.0),
        ("\u22126", 6, 0.0),
        ("It is 42; a slope of 7/0 does not exist", 42, 1.0),
        ("42, not 1,2", 42, 1.0),
        ("3/4/2024", 2024, 0.0),
        ("5/00", 5, 0.0),
        ("1e9999", 9, 0.0),
    ],
)
def test_parts_of_numbers_and_of_differences_are_no_numbers(response: str, answer: Any, expected: float) -> None:
    assert score("numeric", response, answer) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"5 or 1{,}000", "1,000"),
        (r"5 or 1,\!000", "1,000"),
        (r"5 or 1\,000", "1,000"),
        ("5 or 12\u00a0000", "12,000"),
        ("5 or 1\u202f234\u202f567", "1,234,567"),
        (r"\frac{3}{4}", "3/4"),
        (r"-\dfrac{3}{4}$", "-3/4"),
        (r"\tfrac{ 3.5 }{4}", "3.5/4"),
        (r"\frac12", "1/2"),
        ("a loss: -$18", "-18"),
        (r"-\$1{,}800", "-1,800"),
        ("Rs.500", "500"),
        ("No.5", "5"),
        ("it is .5", ".5"),
        ("50 cm^2", "50"),
        (r"50\text{ cm}^{2}", "50"),
        (r"50 m/s^{-2}", "50"),
        (r"90^\circ", "90"),
        (r"2 or 3 \times 10^{5}", "3e5"),
        ("2 or 3.5 \u00d7 10^-4", "3.5e-4"),
        ("2 or 3 \u00d7 10\u2075", "3e5"),
        ("2 or 3.5 \u00b7 10\u207b\u2074", "3.5e-4"),
        ("50 cm\u00b2", "50"),
        (r"90^{\circ}", "90"),
        ("the 5^{th}", "5"),
        ("the 2^nd", "2"),
        (r"the 3^{\text{rd}}", "3"),
        ("45^o", "45"),
        ("__42__", "42"),
        ("1011_2", "1011"),
        (r"1011_{2}", "1011"),
        ("5 = x_1", "5"),
        (r"7 = a_{n-1}", "7"),
        (r"8 x^{n+1}", "8"),
        ("(x+1)^2 = 9", "9"),
        ("f(3)", "3"),
    ],
)
def test_a_number_in_tex_or_print_is_read_whole(text: str, number: str) -> None:
    assert make_extractor("last_number")(text) == number


NO_NUMBERS = r"""12 000; 1 234 567.5; 3 1/2; 3\frac{1}{2}; 3\,\frac{1}{2}; 2^3; 10^{-5}; 2^1.5; 2^n; 2^{n+1}
(2)^3; (1+2)^{n}; \left(\frac{1}{2}\right)^3; x_1; x_{12}; \log_2 n; 2^3 \cdot 10^2; 3/4 \times 10^2; 2e3 \times 10^5
\frac{3\pi}{4}; \frac{2}{\sqrt{3}}"""


@pytest.mark.parametrize("text", [*re.split("; |\n", NO_NUMBERS), "3\u00a01/2", "10\u00b2", "2\u207f", "(2)\u00b3"])
def test_a_number_that_cannot_be_read_for_sure_is_none_nor_are_its_parts(text: str) -> None:
    assert make_extractor("last_number")(text) is None
    assert make_extractor("last_number")(f"42; {text}") == "42"
    with pytest.raises(VerifierError, match="numeric: the prompt's answer contains no number"):
        score("numeric", "1", text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("In 2019 300 came", "300"),
        ("3\n1/2", "1/2"),
        ("5, 100", "100"),
        ("1 2 3", "3"),
        ("5\t100", "100"),
        ("$3$-$5$", "5"),
    ],
)
def test_numbers_side_by_side_are_numbers(text: str, number: str) -> None:
    assert make_extractor("last_number")(text) == number


@given(st.integers(-(10**9), 10**9), st.integers(0, 10**9))
def test_a_difference_ends_with_what_is_subtracted(first: int, second: int) -> None:
    assert make_extractor("last_number")(f"{first}-{second}") == str(second)
    assert make_extractor("last_number")(f"it is {first}, {-second}") == str(-second)


@given(st.lists(st.integers(0, 99), min_size=2, max_size=4))
def test_a_list_without_spaces_is_not_one_number(numbers: list[int]) -> None:
    text = ",".join(map(str, numbers))
    assert score("numeric", f"({text})", text.replace(",", "")) == 0.0


@given(st.integers(-(10**30), 10**30))
def test_every_whole_number_equals_itself_with_separators_too_and_not_its_neighbour(number: int) -> None:
    verifier = build_verifier("numeric", {"tolerance": 0, "absolute_tolerance": 0})
    texts = (f"= {number}", f"= {number:,}", f"= {number + 1}")
    assert [verifier.verify(text, {"answer": str(number)}) for text in texts] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("The answer is (C).", "C", 1.0),
        ("A looks good, but the answer is C", "C", 1.0),
        ("answer: b", "B", 0.0),
        ("Answer: B", "b", 1.0),
        ("<answer>D</answer> because A", "D", 1.0),
        (r"\boxed{A}", "A", 1.0),
        (r"\boxed{\text{A}}", "A", 1.0),
        ("maybe A, no: B", "B", 1.0),
        ("B", 1, 1.0),
        ("B", 1.0, 1.0),
        ("C", "(C)", 1.0),
        ("C", "C) Paris", 1.0),
        ("C", r"\text{(C)}", 1.0),
        ("A", "c. Paris", 0.0),
        ("Because I'm sure", "B", 0.0),
        ("", "A", 0.0),
        ("I'd say A", "A", 1.0),
        ("Because I'm sure: (B).", "B", 1.0),
        ("<answer>B, since A is wrong</answer>", "B", 1.0),
        ("<answer>the answer is C, as A is not</answer>", "C", 1.0),
        ("the answer is option C", "C", 1.0),
    ],
)
def test_choice(response: str, answer: Any, expected: float) -> None:
    assert score("choice", response, answer, letters="ABCD") == expected


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Option C. I am confident.", "C"),
        ("<answer>B. Because I think so</answer>", "B"),
        ("<answer>B because I think so</answer>", "B"),
        (r"\boxed{(B) I think}", "B"),
        ("Answer: I think B", "B"),
        ("C, and that\u2019s all I know", "C"),
        ("I", "I"),
        ("The answer is (I).", "I"),
        ("<answer>I</answer>", "I"),
    ],
)
def test_the_pronoun_is_not_the_ninth_choice(response: str, answer: str) -> None:
    assert score("choice", response, answer) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "**Answer:** B\n\n**Explanation:** Option A is wrong.",
        "**Answer**: B\nA: wrong",
        "## Answer\n\nB\n\nOption A is wrong.",
        "Answer:\r\n\r\nB, not A",
        "The answer is $B$, not A",
        'The answer is "B", not A',
        "The answer is 'B', not A",
        "The answer is \u201cB\u201d, not A",
        "The answer is: **Option B**. Option A is wrong.",
        "The answer is choice: B, not A",
        r"The answer is $\text{B}$, not A",
        r"The answer is \textbf{(B)}, not A",
        r"The answer is \(B\), not A",
        "The correct answer is B. Answer A is wrong because it is.",
        "Answer B, since A fails",
        "The answer (B), because option A is wrong",
        "Answer choice B. A is wrong",
        "The correct choice is B. A triangle has three sides.",
        r"<answer>\text{B}, since A is wrong</answer>",
    ],
)
def test_the_marked_letter_counts_and_not_one_of_the_explanation(response: str) -> None:
    assert score("choice", response, "B") == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "A is right",
        "I would pick A because it is",
        "Option A fits best",
        "Answer: A because B is wrong",
        "Answer: A by elimination of B",
        "<answer>A by far</answer>",
    ],
)
def test_a_letter_before_a_word_that_follows_no_article_is_a_choice(response: str) -> None:
    assert score("choice", response, "A") == 1.0


@given(
    st.sampled_from("ABCDEFGH"), st.sampled_from(["I am sure.", "I think so.", "Because I know it.", "I'd bet on it."])
)
def test_what_follows_the_label_in_a_marked_answer_does_not_choose(letter: str, rest: str) -> None:
    for marked in (
        f"<answer>{letter}. {rest}</answer>",
        f"<answer>({letter}) {rest}</answer>",
        f"Option {letter}. {rest}",
    ):
        assert score("choice", marked, letter) == 1.0


@pytest.mark.parametrize(
    ("response", "options", "expected"),
    [
        ("<think>\n</think>yes", {"pattern": "<think>.*</think>.+"}, 1.0),
        ("well <think></think>yes", {"pattern": "<think>.*</think>.+"}, 0.0),
        ("well <think>", {"pattern": "<think>", "full": False}, 1.0),
        (" yes ", {"pattern": "YES", "ignore_case": True}, 1.0),
    ],
)
def test_regex(response: str, options: dict[str, Any], expected: float) -> None:
    assert score("regex", response, None, **options) == expected


@pytest.mark.parametrize("name", ["exact", "numeric", "choice", "math"])
@pytest.mark.parametrize("metadata", [{}, {"answer": None}, {"answer": True}, {"answer": {"a": 1}}, {"answer": []}])
def test_a_prompt_without_a_usable_answer_is_an_error_never_a_zero(name: str, metadata: Mapping[str, Any]) -> None:
    with pytest.raises(VerifierError, match=f"{name}: the prompt's"):
        build_verifier(name, {}).verify("1", metadata)


@pytest.mark.parametrize(
    ("name", "answer"), [("numeric", "none"), ("numeric", ""), ("choice", "Z"), ("choice", "12"), ("choice", "AB")]
)
def test_an_answer_of_the_wrong_kind_is_an_error(name: str, answer: str) -> None:
    with pytest.raises(VerifierError, match=f"{name}: the prompt's answer"):
        build_verifier(name, {"letters": "ABCD"} if name == "choice" else {}).verify("1", {"answer": answer})


def test_a_composite_is_the_weighted_sum_and_shows_its_parts() -> None:
    parts = {
        "answer": {"verifier": "numeric", "weight": 1.0},
        "form": {"verifier": "regex", "weight": 0.25, "options": {"pattern": "<a>.*</a>"}},
        "inner": {"verifier": "composite", "weight": -0.5, "options": {"parts": {"x": {"verifier": "exact"}}}},
    }
    verifier = build_verifier("composite", {"parts": parts})
    reward = checked_reward(verifier.verify("<a>7</a>", {"answer": 7}), "composite")
    assert reward == RewardParts(value=1.25, parts={"answer": 1.0, "form": 1.0, "inner": 0.0, "inner.x": 0.0})
    assert not verifier.timeout_means_wrong
    counted = build_verifier("composite", {"parts": {"a": {"verifier": "countdown"}}})
    assert counted.timeout_means_wrong, "a composite of verifiers whose time-out means wrong means the same"


def test_a_part_that_fails_fails_the_whole() -> None:
    parts = {"a": {"verifier": "exact"}, "b": {"verifier": "numeric"}}
    with pytest.raises(VerifierError, match="numeric: the prompt's answer contains no number"):
        build_verifier("composite", {"parts": parts}).verify("x", {"answer": "x"})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("exakt", {}, "reward.verifier: 'exakt' is not one of exact, numeric"),
        ("exact", {"extrakt": "whole"}, r"reward.options: exact .*extrakt.*allowed: extract: str = 'whole'"),
        ("exact", {"extract": "nowhere"}, "extract: 'nowhere' is not one of whole"),
        ("countdown", {"hint": 1}, "reward.options: countdown .*allowed: none"),
        ("numeric", {"tolerance": -1}, "reward.options.tolerance: -1"),
        ("numeric", {"tolerance": math.nan}, "reward.options.tolerance: nan"),
        ("choice", {"letters": 4}, r"reward.options.letters: Input should be a valid string \(got 4\)"),
        ("math", {"float_rounding": 1.5}, "reward.options.float_rounding: Input should be a valid integer"),
        ("choice", {"letters": "aab"}, "reward.options.letters"),
        ("regex", {}, "reward.options: regex missing a required argument: 'pattern'"),
        ("regex", {"pattern": "("}, "reward.options.pattern: '\\('"),
        ("composite", {"parts": {}}, "reward.options.parts: expected a mapping"),
        ("composite", {"parts": {"a": {}}}, "reward.options.parts.a: expected verifier"),
        ("composite", {"parts": {"a": {"verifier": "exact", "weight": "1"}}}, "reward.options.parts.a.weight: '1'"),
        ("composite", {"parts": {"a": {"verifier": "exact", "weight": 10**400}}}, "parts.a.weight: 1000"),
        ("composite", {"parts": {"a": {"verifier": "exakt"}}}, "'exakt' is not one of"),
        (
            "composite",
            {"parts": {"a": {"verifier": "http_judge", "options": {"url": "http://x", "api_key_env": "ROLLMESH_KEY"}}}},
            "reward.options.parts.a.options.api_key_env: ROLLMESH_KEY: the processes of a composite verifier get no",
        ),
        ("http_judge", {"url": "ftp://x"}, "reward.options.url"),
        ("http_judge", {"url": "http://x", "format": "chat"}, "format=chat needs model, and a template"),
        ("http_judge", {"url": "http://x", "timeout_seconds": 0}, "timeout_seconds=0"),
        ("http_judge", {"url": "http://x", "api_key_env": "NO_SUCH_KEY_X"}, "variable NO_SUCH_KEY_X is not set"),
        ("http_judge", {"url": "http://x", "score_pattern": "\\d"}, "needs a group around the number"),
        ("python_code", {"timeout_seconds": 0}, "timeout_seconds=0"),
    ],
)
def test_wrong_options_name_the_option_and_what_is_allowed(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_verifier(name, options)


@pytest.mark.parametrize(
    "result",
    [math.nan, math.inf, -math.inf, "1", "", None, 1j, [1.0], {"value": 1}, 10**400, b"1", 1e308, -1e160, 2 * 10**9],
)
def test_a_result_that_is_no_number_of_a_usable_size_is_an_error_never_a_zero(result: object) -> None:
    with pytest.raises(VerifierError, match="mine: "):
        checked_reward(result, "mine")
    with pytest.raises(VerifierError, match="mine: part 'a'"):
        checked_reward(RewardParts(value=1.0, parts={"a": result}), "mine")  # type: ignore[dict-item]


def test_a_part_whose_name_has_half_a_character_is_an_error() -> None:
    with pytest.raises(VerifierError, match="mine: part .*udc00.*half of a surrogate pair"):
        checked_reward(RewardParts(value=1.0, parts={"a\udc00": 1.0}), "mine")


@pytest.mark.parametrize("result", [1, 0.5, np.float32(0.5), np.int64(3), -2, True, False, np.bool_(True)])
def test_every_kind_of_real_number_and_a_truth_value_is_a_reward(result: Any) -> None:
    assert checked_reward(result, "mine").value == float(result)


POISON = {
    "megabyte": "x" * 1_000_000,
    "open brackets": "(" * 100_000,
    "braces": "{" * 100_000 + "}" * 100_000,
    "numbers": "1 " * 500_000,
    "boxes": r"\boxed{" * 100_000,
    "nul": "\x00" * 10,
    "marks": "<answer>answer is" + " *" * 500_000 + "</answer>",
    "fractions": r"\frac{" * 100_000,
    "braces in fractions": r"\frac{{}" * 100_000,
    "digits": "1" * 500_000 + " " + "1" * 500_000,
}


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"http_judge", "composite", "python_code", "reasoning_gym"}))
@pytest.mark.parametrize("response", POISON.values(), ids=POISON)
def test_poisonous_text_is_wrong_and_cheap(name: str, response: str) -> None:
    options = {"pattern": "a+b"} if name == "regex" else {}
    verifier = build_verifier(name, options)
    metadata = {"answer": "B", "numbers": [1, 2], "target": 3} if name != "numeric" else {"answer": 5}
    start = time.thread_time()  # the work itself: a busy machine may delay any process
    assert checked_reward(verifier.verify(response, metadata), name).value == 0.0
    assert time.thread_time() - start < 1.0


@pytest.mark.parametrize("rounding", [3, 3.0, "3"])
def test_an_option_has_the_type_of_its_parameter_however_yaml_wrote_it(rounding: Any) -> None:
    verifier = build_verifier("math", {"float_rounding": rounding})
    assert [verifier.verify(text, {"answer": "1.2341"}) for text in ("1.2344", "1.239")] == [1.0, 0.0]
    assert build_verifier("numeric", {"tolerance": "1e-3"}).verify("1000.5", {"answer": 1000}) == 1.0
