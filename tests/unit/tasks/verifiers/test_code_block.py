"""Which part of an answer is its code."""

from __future__ import annotations

import time

import pytest

from rollmesh.tasks.verifiers.code_block import extract_code


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
