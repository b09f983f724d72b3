"""Answers that are programs: what python does with their file, many inputs, a prelude, and floats in their output."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollmesh.errors import ConfigError
from rollmesh.tasks.sandbox import command
from rollmesh.tasks.sandbox.command import Isolation
from rollmesh.tasks.verifiers.code_tests import same_output
from rollmesh.tasks.verifiers.python_code import PythonCodeVerifier

from .code_answers import WAIT_SECONDS, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and resource limits are Linux's")

LARGEST = "def f(xs: List[int]) -> int:\n    return max(xs)"
DOUBLE_OR_MORE = {"tests": [{"input": "3\n", "output": "3\n"}]}
HALF = {"entry_point": "half", "tests": [{"args": [1], "expected": 0.5}]}
PRINTS_ONE_MORE = {"tests": [{"input": "3\n", "output": "4\n"}]}


@pytest.mark.usefixtures("code_may_run")
@pytest.mark.parametrize(
    ("code", "metadata", "options", "expected"),
    [
        ("n = int(input())\nprint(n + 1)\nquit()", PRINTS_ONE_MORE, {}, 1.0),
        ("n = int(input())\nprint(n + 2)\nquit()", PRINTS_ONE_MORE, {}, 0.0),
        (LARGEST, {"tests": ["assert f([1, 3, 2]) == 3"]}, {"prelude": "from typing import *"}, 1.0),
        (LARGEST, {"tests": ["assert f([1, 3, 2]) == 3"]}, {}, 0.0),
        (f"{LARGEST}\nprint(f([int(input()), 1]))", DOUBLE_OR_MORE, {"prelude": "from typing import *"}, 1.0),
        ("print(1 / 3)", {"tests": [{"input": "", "output": "0.333333\n"}]}, {"tolerance": 1e-4}, 1.0),
        ("print(1 / 3)", {"tests": [{"input": "", "output": "0.333333\n"}]}, {}, 0.0),
        ("print(1 / 3)", {"tests": [{"input": "", "output": "0.333\n"}]}, {"tolerance": 1e-4}, 0.0),
        ("def half(n): return n / 2 + 1e-5", HALF, {"tolerance": 1e-4}, 1.0),
    ],
)
def test_prelude_tolerance_and_the_names_of_an_interpreter_are_there(
    code: str, metadata: dict[str, Any], options: dict[str, Any], expected: float
) -> None:
    assert run(code, metadata, **options).value == expected


AS_PYTHON_DOES = {
    "exit": "print(input()); exit()",
    "exit with a message": "print(input()); quit('no')",
    "/dev/stdout": "open('/dev/stdout', 'w').write(open('/dev/stdin').read())",
    "/dev/stdout after print": "print(1, flush=True)\nwith open('/dev/stdout', 'w') as out: out.write('2')\nprint(3)",
    "/dev/stderr": "open('/dev/stderr', 'w').write('noise'); print(input())",
    "descriptors": "import os; os.write(1, os.read(0, 9))",
    "standard streams": "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())",
    "another input": "import io, sys; input = io.StringIO(sys.stdin.read()).readline; print(input())",
    "module": "import sys; print(__name__, __doc__, sys.argv, sys.modules['__main__'].__file__ == __file__)",
    "docstring": "'About'\nfrom __future__ import annotations\nprint(__doc__)",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__module__)",
    "source": "import inspect\ndef f(): pass\nprint(inspect.getsource(f))",
    "own module": "open('mine.py', 'w').write('x = 3'); import mine; print(mine.x)",
    "late thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start()",
    "at exit": "import atexit; atexit.register(print, 'bye')",
    "end of an object": "class A:\n    def __del__(self): print('gone')\na = A()",
    "recursion": "import sys; sys.setrecursionlimit(5000)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(4000))",
    "coding": "# coding: latin-1\nprint('x')",
    "help": "print(help, copyright, sep='\\n')",
    "signal": "import signal; signal.raise_signal(signal.SIGTERM)",
    "error": "print(input()); 1 / 0",
    "syntax": "print(",
    "sum": "import sys; print(sum(map(int, sys.stdin)))",
}


@pytest.mark.usefixtures("code_may_run")
@pytest.mark.parametrize("name", AS_PYTHON_DOES)
def test_a_program_does_what_python_does_with_its_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "answer.py").write_text(AS_PYTHON_DOES[name])
    done = subprocess.run(
        [sys.executable, "answer.py"], cwd=tmp_path, input="12\n", capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    reward = run(AS_PYTHON_DOES[name], {"tests": [{"input": "12\n", "output": done.stdout}]})
    assert reward.value == (done.returncode == 0)


@pytest.mark.usefixtures("code_may_run")
def test_each_program_begins_with_an_empty_folder_and_memory() -> None:
    code = (
        "import builtins, os\nprint(sorted(os.listdir()), hasattr(builtins, 'mine'))\nbuiltins.mine = 1\n"
        "os.makedirs('a/b'); open('c', 'w').close(); os.unlink('answer.py')"
    )
    tests = [{"input": "", "output": "['answer.py'] False\n"}] * 3
    assert run(code, {"tests": tests}).value == 1.0


REACHES_FOR_OTHERS = """
import glob, os, resource
number = input()
reached = []
if number == "1":
    own = f"/proc/{os.getpid()}/"
    for name in glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/[0-9]*/mem"):
        for mode in () if name.startswith(own) else (os.O_RDONLY, os.O_WRONLY):
            try:
                descriptor = os.open(name, mode | os.O_NONBLOCK)
                reached.append((name, mode))
                os.write(descriptor, b'0 {"value": {"bytes": ""}}\\n2 {"value": {"bytes": "2a0a"}}\\n')
            except OSError:
                pass
print(number, reached)
"""
LEAVES = """
import os, time
def lives(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
print(*map(os.path.exists, ("/tmp/kept", "/dev/shm/kept", "closed")), sum(map(lives, range(1, 99))))
open("/tmp/kept", "w").close()
open("/dev/shm/kept", "w").close()
os.makedirs("closed/kept")
os.chmod("closed", 0)
os.chmod(".", 0o500)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        time.sleep(600)
    os._exit(0)
os.wait()
"""


@pytest.mark.usefixtures("code_may_run")
def test_a_program_reaches_neither_the_input_nor_the_result_of_another_one() -> None:
    tests = [{"input": f"{number}\n", "output": f"{number} []\n"} for number in range(4)]
    assert run(REACHES_FOR_OTHERS, {"tests": tests}, partial_credit=True).value == 1.0


@pytest.mark.usefixtures("code_may_run")
@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's code is refused below the strongest isolation")
@pytest.mark.parametrize("isolation", [Isolation.SEALED, Isolation.NAMESPACES])
def test_nothing_of_a_program_is_left_when_the_next_one_begins(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "strongest_isolation", lambda uid: isolation)
    tests = [{"input": "", "output": "False False False 3\n"}] * 3
    reward = run(LEAVES, {"tests": tests}, may_fork=True, memory_bytes=4 << 30, partial_credit=True)
    assert reward.value == 1.0, "three processes: the first one, the one that watches the program, and the program"


@pytest.mark.usefixtures("code_may_run")
def test_a_hundred_programs_take_little_longer_than_one() -> None:
    seconds = []
    for count in (1, 100):
        tests = [{"input": f"{n}\n", "output": f"{n + 1}\n"} for n in range(count)]
        start = time.monotonic()
        reward = run("print(int(input()) + 1)", {"tests": tests})
        seconds.append(time.monotonic() - start)
        assert reward.parts["tests_passed"] == count
    assert seconds[1] < 40 * seconds[0], "a sandbox for each would take a hundred times as long"


@pytest.mark.usefixtures("code_may_run")
def test_a_prelude_that_fails_is_refused_at_the_start() -> None:
    for prelude, problem in (("import nothing_z", "No module named 'nothing_z'"), ("def f(", "never closed")):
        with pytest.raises(ConfigError, match=rf"reward\.options\.prelude: it fails: .*{problem}"):
            PythonCodeVerifier(prelude=prelude)


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ("0.333333", "0.33333333333", True),
        ("1 2.50 x\n-1e-7", "1 2.5 x\n0.0", True),
        ("1000000.0", "1000050", True),
        ("1000000.0", "1000200", False),
        ("1000000", "1000001", False),
        ("1.5 2", "1.5", False),
        ("1.5\n2", "1.5 2", False),
        ("nan", "nan", True),
        ("inf", "1e999", False),
        ("1.0", "1_0", False),
        ("0.5", "1/2", False),
        ("[0.333333, 1.0] (3.)", "[0.3333333333, 1.00] (3)", True),
        ("x=0.5;y=2", "x=0.50001;y=2", True),
        ("[0.5, 1.0]", "[0.5, 1.0, 1.0]", False),
        ("[1, 2]", "[1, 3]", False),
        ("v1.20", "v1.2", False),
        ("1.2.3", "1.2.30", False),
        ("1e3", "1000.001", True),
        ("a 0.5", "b 0.5", False),
        ("0.5", "٠.5", False),
    ],
)
def test_printed_numbers_are_compared_with_a_tolerance(expected: str, got: str, same: bool) -> None:
    assert same_output(expected, got, 1e-4) is same


@pytest.mark.parametrize("tolerance", [0.0, 1e-4])
def test_printed_text_is_compared_without_trailing_space(tolerance: float) -> None:
    pairs = [("a \nb\n", "a\nb"), ("", "\n\n"), ("a\n\nb", "a\nb")]
    assert [same_output(expected, got, tolerance) for expected, got in pairs] == [True, True, False]
    assert not same_output(" a", "a")
