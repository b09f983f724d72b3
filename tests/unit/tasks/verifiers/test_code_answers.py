"""Code of an answer, and the split of assert tests."""

import json
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.errors import VerifierError
from rollmesh.tasks.verifiers.code_asserts import split_asserts
from rollmesh.tasks.verifiers.code_runner import plain, run_script
from rollmesh.tasks.verifiers.code_tests import read_value
from rollmesh.tasks.verifiers.extraction import extract_code


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("no fence", "no fence"),
        # the last tagged block, untagged ones only without any
        ("```py\na\n```\ntext\n```\nb\n```", "a\n"),
        ("```python\nprint(1)\n```\nExample:\n```\n3\n```\nOutput:\n```\n6\n```", "print(1)\n"),
        ("```python\na\n```\nBetter:\n```python\nb\n```\nOutput:\n```\n6\n```", "b\n"),
        ("```\na\n```\nBetter:\n```\nb\n```", "b\n"),
        ("```text\nnotes\n```\nSo:\n```python\na\n```\nDone.", "a\n"),
        ("```bash\nls\n```\n```\na\n```", "a\n"),
        ("```python\na\n```\n```json\n{}\n```", "a\n"),
        ("```python\na\n```\n```python\n\n```", "a\n"),
        # cut off before the closing fence
        ("```python\nopen", "open\n"),
        ("Here it is:\n```python\nprint(1)\n", "print(1)\n\n"),
        ("Here it is:\n```\nprint(1)", "print(1)\n"),
        ("```python\na\n```\n```python\nopen", "a\n"),
        ("Input:\n```\n3\n```\n```python\nopen", "open\n"),
        ("```python\na\n``", "a\n"),
        # fences within the code, and tags after its fence
        (
            '```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n```\n',
            'def f():\n    """\n    ```\n    f()\n    ```\n    """\n',
        ),
        ("<answer>\n```python\na\n```</answer>", "a\n"),
        ("````python\n```\na\n````\nOutput:\n```\n6\n```", "```\na\n"),
        ("~~~python\na\n~~~\n```\n6\n```", "a\n"),
        # the prompt opened the block
        ("python\nprint(1)\n```\nThis prints 1.", "print(1)\n"),
        ("python\nprint(1)\n", "print(1)\n\n"),
        ("print(1)\n```", "print(1)\n"),
        ("    n = 1\n    print(n)\n```\nThis prints 1.", "n = 1\nprint(n)\n"),
        ("print(1)\n```\nOutput:\n```\n1\n```", "print(1)\n"),
        ("print(1)\n```\nIt runs so:\n```bash\npython a.py\n```", "print(1)\n"),
        ("This is it.\n```\nprint(1)", "print(1)\n"),
        # spellings of fences
        ("```Python3 title=x\na\n```", "a\n"),
        ("```py3\na\n```\n```\n6\n```", "a\n"),
        ("```{.python}\na\n```", "a\n"),
        ("The code: ```python\na\n```", "a\n"),
        ("```python\r\na\r\n\r\nb\r\n```\r\nDone.", "a\n\nb\n"),
        ("1. So:\n\n   ```python\n   if a:\n\n       b\n   ```\n", "if a:\n\n    b\n"),
        ("Use ```x``` here:\n```py\na = '```'\n```", "a = '```'\n"),
    ],
)
def test_the_last_tagged_block_is_the_code_and_an_untagged_one_without_any(response: str, code: str) -> None:
    assert extract_code(response) == code


@pytest.mark.parametrize(
    "response", ["```py\n" * 100_000, "```" + "a" * 400_000 + "`", " ```\n" * 80_000, "-" * 399_990 + "1\n```"]
)
def test_fences_without_end_are_read_in_linear_time(response: str) -> None:
    start = time.thread_time()
    extract_code(response)
    assert time.thread_time() - start < 1.0


ANSWER = compile(
    """
import math
from collections import OrderedDict
class Everything:
    def __eq__(self, other): return True
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    __hash__ = None
    def __sub__(self, other): return 0
    def startswith(self, text): return True
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
def double(x): return 2 * x
def fake(x): return Everything()
def numbers(n): yield from range(n)
def sort(items): items.sort()
def ordered(): return OrderedDict(a=1)
def sum(a, b): return a - b
def encode(text): return text[::-1]
decode = encode
""",
    "answer",
    "exec",
)


def passes(text: str, entry_point: str = "double") -> bool:
    """Tell whether a test passes for the answer above, over the same JSON as between the processes."""
    test = split_asserts(text, entry_point, "tests[0]")
    namespace: dict[str, Any] = {}
    exec(ANSWER, namespace)
    script = json.loads(json.dumps(test.steps))
    reported = json.loads(json.dumps(run_script(namespace, script)))
    return test.passes([read_value(value) for value in reported])


@pytest.mark.parametrize(
    "text",
    [
        "assert double(2) == 4",
        "assert 4 == double(2), 'a message'",
        "assert double(2) != 5 and 3 < double(2) <= 4",
        "assert double((1, 2)) == (1, 2, 1, 2)",
        "assert set(double([1, 2])) == {1, 2}",
        "assert abs(double(0.5) - 1.0) < 1e-6",
        "import math\nassert math.isclose(double(0.5), 1.0, rel_tol=1e-3)",
        "assert double(math.pi) == 2 * math.pi",
        "assert double(0) == 0 or double(0) is None",
        "assert double('ab').startswith('aba')",
        "assert ','.join(double(['a'])) == 'a,a'",
        "assert list(numbers(3)) == [0, 1, 2]",
        "assert numbers(3) != [0, 1, 2]",
        "assert all(a == b for a, b in zip(numbers(2), [0, 1]))",
        "assert [x for x in numbers(9) if x > 6] == [7, 8]",
        "g = numbers(2)\nassert next(g) == 0\nassert next(g) == 1",
        "assert ordered() == {'a': 1} and isinstance(ordered(), dict)",
        "assert type(double(1)) is int",
        "assert Counter(double('ab')) == Counter(a=2, b=2)",
        "x = [3, 1]\nsort(x)\nassert x == [1, 3]",
        "text = 'abc'\nassert decode(encode(text)) == text",
        "expected = [2, 4]\nassert [double(1), double(2)] == expected",
        "s = Stack()\ns.push(7)\nassert len(s) == 1\nassert s.pop() == 7\nassert not len(s)",
        "assert isinstance(Stack(), Stack)",
        "assert sum(10, 15) == -5",
        "for x, y in [(1, 2), (2, 4)]:\n    assert double(x) == y",
        "cases = [('a', 'aa')]\nfor x, y in cases:\n    result = double(x)\n    assert result == y",
        "for i in range(5): assert double(i) == i + i",
        "METADATA = {}\ndef check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 4, 'x'\n",
        "def check(candidate):\n    assert candidate(1) == 2\ncheck(double)",
        "assert double([x for x in range(5) if x > 3]) == [4, 4]",
        "assert sorted(double([1, 5]), key=lambda x: x < 3) == [5, 5, 1, 1]",
        "assert True",
    ],
)
def test_a_right_answer_passes_each_form_that_data_sets_use(text: str) -> None:
    assert passes(text)


@pytest.mark.parametrize(
    "text",
    [
        "assert double(2) == 5",
        "assert fake(1) == 4",
        "assert 4 == fake(1)",
        "assert fake(1) in (1, 2)",
        "assert 2 in fake(1)",
        "assert fake(1) < 5",
        "assert abs(fake(1) - 0.5) < 1e-6",
        "assert fake(1).startswith('a')",
        "assert max(fake(1), 5) == 5",
        "assert double(0)",
        "assert not double(1)",
        "assert double('x') + 1 == 2",
        "for x, y in [(1, 2), (2, 5)]:\n    assert double(x) == y",
        "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 5\n",
    ],
)
def test_a_wrong_answer_and_an_object_that_equals_everything_fail(text: str) -> None:
    assert not passes(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("assert", "is not Python"),
        ("assert double(1) == double(2)", "compares values that all come from the answer"),
        ("assert math.isclose(double(1), double(2))", "compares values that all come from the answer"),
        ("def same(a, b): return a == b\nassert same(double(1), 2)", "'same' is defined by the test"),
        ("import helper\nassert helper.same(double(1), 2)", "'helper' is defined by the test"),
        ("try:\n    double(1)\n    assert False\nexcept ValueError:\n    pass", "inside another statement"),
        ("while True:\n    assert double(1) == 2", "inside another statement"),
        ("for i in range(10**9):\n    assert double(i) == i", "inside another statement"),
        ("assert all(double(i) == i for i in range(3))", "depends on the loop variable 'i'"),
        ("assert double(1).__eq__(2)", "would compare inside the answer's process"),
        ("assert repr(double(1) == 2) == 'True'", "cannot be called outside"),
        ("d = table()\nassert d[double(1) == 2] == 1", "would compare inside the answer's process"),
        ("assert next(x for x in numbers(9) if x == 5) == 5", "would compare inside the answer's process"),
        ("assert eval('double(1) == 2')", "is a built-in name that tests cannot use"),
        ("assert (lambda x: x == 2)(double(1))", "cannot be called outside"),
        ("assert double(1) == ().__class__", "cannot be evaluated outside"),
        ("assert math.__loader__ == double(1)", "cannot be evaluated outside"),
        ("assert '{0.__class__}'.format(1) == double(1)", "cannot be called outside"),
    ],
)
def test_a_form_that_cannot_be_split_is_refused_with_the_test_that_has_it(text: str, reason: str) -> None:
    with pytest.raises(VerifierError, match="tests\\[0\\]: ") as refused:
        split_asserts(text, "double", "tests[0]")
    assert reason in str(refused.value)


def test_expected_values_are_in_no_step() -> None:
    text = "limit = 777\nx = 5\nassert double(x) == 778\nassert double(x) < limit\nassert abs(double(x) - 779) < 780"
    steps = split_asserts(text, "double", "tests[0]").steps
    assert steps == (("run", "x = 5"), ("value", "double(x)"), ("value", "double(x)"), ("value", "double(x)"))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.decimals(allow_nan=False) | st.fractions() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner)
    | st.frozensets(st.integers() | st.text()) | st.sets(st.tuples(st.integers(), st.text())),
    max_leaves=8,
)  # fmt: skip


@given(PLAIN)
def test_every_plain_value_arrives_as_it_is(value: Any) -> None:
    arrived = read_value(json.loads(json.dumps(plain(value))))
    assert arrived == value
    assert repr(arrived) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple)


@given(st.recursive(st.integers() | st.text() | st.booleans() | st.none(), st.lists), st.integers())
def test_an_assert_holds_exactly_for_the_value_it_names(value: Any, other: int) -> None:
    test = split_asserts(f"assert f(1) == {value!r}", "f", "tests[0]")
    assert test.passes([value])
    assert test.passes([other]) == (other == value)
    assert not test.passes([object()])


def test_a_report_that_no_runner_writes_proves_nothing() -> None:
    test = split_asserts("assert f(1) == 1", "f", "tests[0]")
    for values in ([], [None], [{}], [Decimal(2)], [Fraction(1, 2)]):
        assert not test.passes(values)
    with pytest.raises(KeyError):
        read_value({"__import__": "os"})
