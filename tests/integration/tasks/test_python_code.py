"""Code against tests: right, wrong, cheating and poisonous, in a real sandbox."""

import json
import os
import re
import sys
import time
from contextlib import suppress
from typing import Any

import psutil
import pytest

from rollmesh.errors import ConfigError, VerifierError
from rollmesh.tasks.sandbox import command, identity, kernel
from rollmesh.tasks.sandbox.command import Isolation
from rollmesh.tasks.sandbox.identity import own_uid
from rollmesh.tasks.verifiers.code_tests import same_value
from rollmesh.tasks.verifiers.python_code import PythonCodeVerifier

from ...kit.waiting import until
from .code_answers import WAIT_SECONDS, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and resource limits are Linux's")

ADD = {"entry_point": "add", "tests": [{"args": [1, 2], "expected": 3}, {"args": [-1, 1], "expected": 0}]}
ASSERTED = {"tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}
DOUBLE = {"tests": [{"input": "3\n", "output": "6"}, {"input": ["4"], "output": ["8"]}]}
HALF = {"entry_point": "half", "tests": [{"args": [1], "expected": 0.5}]}
GOOD = "def add(a, b): return a + b\n"
RECORD = """
import dataclasses, pickle
@dataclasses.dataclass
class Sum:
    value: int
def add(a, b): return pickle.loads(pickle.dumps(Sum(a + b))).value
"""
METHOD = {"entry_point": "Solution.add", "tests": [{"args": [1], "kwargs": {"b": 2}, "expected": 3}]}


@pytest.mark.usefixtures("code_may_run")
@pytest.mark.parametrize(
    ("code", "metadata", "expected"),
    [
        ("def add(a, b): return a + b", ADD, 1.0),
        ("def add(a, b): return a + b", ASSERTED, 1.0),
        ("def add(a, b): return a + b", {"tests": '["assert add(2, 2) == 4"]'}, 1.0),
        ("def add(a, b): return 3", ADD, 0.0),
        ("def add(a, b): return 3", ASSERTED, 0.0),
        ("def add(a, b): return '3'", ADD, 0.0),
        ("def add(a, b): print('noise'); return a + b", ADD, 1.0),
        ("class Solution:\n    def add(self, a, b): return a + b", METHOD, 1.0),
        ("print(int(input()) * 2)", DOUBLE, 1.0),
        ("print(int(input()) + 3)", DOUBLE, 0.0),
        ("import math, heapq, collections\ndef add(a, b): return math.fsum([a, b])", ADD, 1.0),
        ("Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", ADD, 1.0),
        ("```python\nprint(int(input()) * 2)\n```\nExample:\n```\n3\n```\nOutput:\n```\n6\n```", DOUBLE, 1.0),
        ("Here it is:\n```python\nprint(int(input()) * 2)\n", DOUBLE, 1.0),
        (f"{GOOD}if __name__ == '__main__':\n    import unittest\n    unittest.main()", ADD, 1.0),
        (f"{GOOD}if __name__ == '__main__':\n    import unittest\n    unittest.main()", ASSERTED, 1.0),
        (f"{GOOD}def main(): return 0\nimport sys\nsys.exit(main())", ADD, 1.0),
        (f"{GOOD}def main(): print(add(int(input()), 1))\nmain()", ASSERTED, 1.0),
        ("if __name__ == '__main__':\n    print(int(input()) * 2)", DOUBLE, 1.0),
        (RECORD, ADD, 1.0),
        ("", ADD, 0.0),
        ("not python at all", ADD, 0.0),
        ("def other(): pass", ADD, 0.0),
        ("raise SystemExit(0)", ADD, 0.0),
        ("import numpy", ADD, 0.0),
        ("def half(n): return n / 2", HALF, 1.0),
        ("def half(n): return 10**400", HALF, 0.0),
        ("def half(n): return 10**5000", HALF, 0.0),
        ("def half(n): return float('nan')", HALF, 0.0),
        ("def half(n):\n    for _ in range(10**5): n = [n]\n    return n", HALF, 0.0),
    ],
)
def test_code_is_worth_one_when_all_tests_pass(code: str, metadata: dict[str, Any], expected: float) -> None:
    assert run(code, metadata).value == expected


@pytest.mark.usefixtures("code_may_run")
def test_partial_credit_is_the_share_of_passed_tests() -> None:
    reward = run("def add(a, b): return 3", ADD, partial_credit=True)
    assert (reward.value, reward.parts["tests_passed"], reward.parts["tests"]) == (0.5, 1, 2)


CHEATS = {
    "exits before the tests": "import os; os._exit(0)",
    "prints a result": "print('0 {\"value\": 3}')\ndef add(a, b): pass",
    "prints to every descriptor": (
        "import os\nfor n in range(1, 9):\n    try: os.write(n, b'x 0 {\"value\": 3}\\n')\n    except OSError: pass"
    ),
    "returns an object equal to all": (
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()"
    ),
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "kills all it may": "import os, signal\nos.kill(-1, signal.SIGKILL)",
}


ASSERT_CHEATS = {
    "patches json.dumps": (
        "import json\njson.dumps = lambda value, *_, **__: '{\"value\": null}'\ndef add(a, b): return 'wrong'"
    ),
    "writes reports in the name of the runner": (
        "import os, sys\nframe = sys._getframe()\n"
        "while frame and 'nonce' not in frame.f_locals and 'job' not in frame.f_locals: frame = frame.f_back\n"
        "nonce = frame.f_locals.get('nonce', '') if frame else ''\n"
        "for n in range(3, 9):\n    for test in range(2):\n"
        "        line = f'{nonce} {test} {{\"value\": null}}\\n'.lstrip()\n"
        "        try: os.write(n, line.encode())\n        except OSError: pass\n"
        "def add(a, b): pass"
    ),
    "is equal to all": (
        "class Any:\n    def __eq__(self, other): return True\n    def __sub__(self, other): return 0\n"
        "    def __abs__(self): return 0\ndef add(a, b): return Any()"
    ),
    "replaces the built-in functions": (
        "import builtins\nbuiltins.bool = builtins.abs = lambda *_: True\n"
        "builtins.exec = builtins.eval = lambda *_: 3\n"
        "def add(a, b): pass"
    ),
}


@pytest.mark.usefixtures("code_may_run")
@pytest.mark.parametrize("code", [*CHEATS.values(), *ASSERT_CHEATS.values()], ids=[*CHEATS, *ASSERT_CHEATS])
def test_cheating_at_calls_and_asserts_earns_nothing(code: str) -> None:
    assert run(code, ADD).value == 0.0
    assert run(code, ASSERTED).value == 0.0


@pytest.mark.usefixtures("code_may_run")
def test_what_asserts_expect_is_not_in_the_process_that_runs_the_answer() -> None:
    secret = "the-expected-text"
    code = (
        "import sys\ndef add(a, b):\n    frame, seen = sys._getframe(), ''\n"
        "    while frame: seen += repr(frame.f_locals); frame = frame.f_back\n"
        "    i = seen.find('detcepxe'[::-1] + '-text') - 1\n"
        "    return seen[i - 3:i + 14] if i > 0 else 'the-' + 'not there'"
    )
    assert run(code, {"tests": [f"assert add(1, 2) == {secret!r}"]}).value == 0.0
    assert run(code, {"tests": ["assert add(1, 2) == 'the-not there'"]}).value == 1.0


POISON = {
    "megabyte": "x" * 1_000_000,
    "deep brackets": "(" * 100_000,
    "infinite loop": "while True: pass",
    "sleep": "import time; time.sleep(1000)",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()",
    "memory bomb": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "disk bomb": "n = 0\nwhile True:\n    n += 1\n    open(f'f{n}', 'wb').write(bytes(1 << 20))",
    "output bomb": "while True: print('x' * 100000)",
    "descriptor bomb": "import os\nwhile True: os.open('/dev/null', 0)",
    "daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n"
        "else: time.sleep(1000)"
    ),
}


@pytest.mark.usefixtures("code_may_run")
@pytest.mark.parametrize("code", POISON.values(), ids=POISON.keys())
def test_poison_is_wrong_in_time_and_leaves_nothing_behind(code: str) -> None:
    start = time.monotonic()
    reward = run(code, ADD, timeout_seconds=0.5)
    assert reward.value == 0.0
    assert time.monotonic() - start < WAIT_SECONDS / 2
    wait_until_nothing_is_left()


@pytest.mark.usefixtures("code_may_run")
@pytest.mark.parametrize("name", ["output bomb", "daemon"])
def test_a_poisonous_program_is_wrong_in_time_too(name: str) -> None:
    assert run(POISON[name], DOUBLE, timeout_seconds=0.5).value == 0.0
    wait_until_nothing_is_left()


def wait_until_nothing_is_left() -> None:
    until(lambda: not processes_of_our_sandboxes(), lambda: str(processes_of_our_sandboxes()), WAIT_SECONDS)


def processes_of_our_sandboxes() -> list[psutil.Process]:
    """Living processes of the uid that this process gives to code; without root, its children."""
    uid = own_uid(0) if os.geteuid() == 0 else None
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = process.uids().real == uid if uid is not None else process.ppid() == os.getpid()
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.usefixtures("code_may_run")
def test_a_time_out_is_wrong_and_marked() -> None:
    code = "import time\ndef add(a, b):\n    if a < 0: time.sleep(1000)\n    return a + b"
    for seconds in (5.0, 20.0, 60.0):  # until an interpreter has the time to start and to answer the first test
        reward = run(code, ADD, timeout_seconds=seconds, partial_credit=True)
        assert reward.parts["timed_out"] == 1.0
        if reward.value:
            break
    assert reward.value == 0.5, "the test that finished still counts"


PROBE = """
import json, os, resource, time
children = 0
try:
    while children < 99:
        if os.fork() == 0:
            time.sleep(30)
        children += 1
except OSError:
    pass
print(json.dumps({
    "uid": os.getuid(), "children": children, "files": sorted(os.listdir(".")), "environment": sorted(os.environ),
    "memory": resource.getrlimit(resource.RLIMIT_AS)[1], "last_descriptor": max(map(int, os.listdir("/proc/self/fd")))
}), flush=True)
os._exit(0)
"""


@pytest.mark.usefixtures("code_may_run")
def test_what_code_can_see_and_use_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMESH_STORE__PASSWORD", "secret")
    verifier = PythonCodeVerifier(process_count=8)
    result = verifier.sandbox.run(PROBE.encode(), b"", WAIT_SECONDS)
    seen = json.loads(result.stdout)
    assert seen["uid"] == (own_uid(0) if os.geteuid() == 0 else os.getuid())
    assert seen["children"] <= 8
    assert seen["memory"] == 512 << 20
    assert seen["files"] == ["answer.py"]
    assert not any("ROLLMESH" in name for name in seen["environment"])
    assert seen["last_descriptor"] < 8


@pytest.mark.usefixtures("code_may_run")
@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "needs a list 'tests', got NoneType"),
        ({"tests": []}, "needs a list 'tests'"),
        ({"tests": "[1"}, "field 'tests' is not valid JSON"),
        ({"tests": [7]}, r"tests\[0\]: expected a text with asserts"),
        ({"tests": [{"input": "1"}]}, r"tests\[0\]: expected a text with asserts"),
        ({"tests": ["import math"]}, "no text in the field 'tests' contains an assert"),
        ({"tests": ["assert f(1) == 1", "assert f(1) == g(1)"]}, r"tests\[1\]: 'f\(1\) == g\(1\)' compares values"),
        ({"tests": [{"input": 1, "output": "2"}]}, r"tests\[0\]: input and output must be text"),
        ({"tests": [{"args": [1], "expected": 2}]}, "need the field 'entry_point'"),
        ({"tests": [{"args": 1, "expected": 2}], "entry_point": "f"}, r"tests\[0\]: args must be a list"),
    ],
)
def test_wrong_tests_are_an_error_never_a_zero(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(VerifierError, match=re.compile(message)):
        run("x = 1", metadata)


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (0.1, 0.1 + 1e-9, True),
        (0.1, 0.2, False),
        (1.6e-19, 9.1e-31, False),
        (0.0, 1e-12, True),
        (True, 1, False),
        (1, True, False),
        (None, None, True),
        ([1, [2.0]], [1, [2]], True),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1}, {"b": 1}, False),
        ("1", 1, False),
        (10**18 + 1, 10**18, False),
    ],
)
def test_values_are_compared_as_json(expected: Any, got: Any, same: bool) -> None:
    assert same_value(expected, got) is same


@pytest.fixture
def no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that allows no user namespaces, as in most containers."""
    monkeypatch.setattr(command, "strongest_isolation", lambda uid: Isolation.NONE)


@pytest.mark.usefixtures("no_namespaces")
@pytest.mark.skipif(os.geteuid() != 0, reason="without namespaces, code is let loose only under a uid of its own")
@pytest.mark.parametrize("name", ["fork bomb", "daemon", "memory bomb", "output bomb", "infinite loop"])
def test_without_namespaces_poison_is_still_wrong_in_time_and_leaves_nothing_behind(name: str) -> None:
    assert run(POISON[name], ADD, timeout_seconds=0.5).value == 0.0
    wait_until_nothing_is_left()
    assert not kernel.adopts_orphans(), "no process collects orphans once the code has ended"


@pytest.mark.usefixtures("no_namespaces")
@pytest.mark.skipif(os.geteuid() != 0, reason="without namespaces, code is let loose only under a uid of its own")
def test_without_namespaces_good_code_runs_and_cheating_earns_nothing() -> None:
    assert run("def add(a, b): return a + b", ADD).value == 1.0
    for code in CHEATS.values():
        assert run(code, ADD).value == 0.0


@pytest.mark.usefixtures("no_namespaces")
def test_code_is_refused_where_it_could_reach_processes_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(identity.OWN_UID_VARIABLE, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=r"share its uid with other processes.*allow_shared_uid"):
        PythonCodeVerifier()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(identity, "can_become", lambda uid: False)
    with pytest.raises(ConfigError, match="root here cannot take another uid"):
        PythonCodeVerifier()
