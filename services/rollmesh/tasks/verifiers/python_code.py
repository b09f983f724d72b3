"""Verifier that runs the Python code of an answer against tests, in ``tasks.sandbox``; Linux only."""

import json
import marshal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.tasks.sandbox import kernel
from rollmesh.tasks.sandbox.command import Sandbox
from rollmesh.tasks.sandbox.identity import ResourceLimits
from rollmesh.tasks.verifiers.code_tests import CodeTests, read_tests, read_value, same_output, same_value
from rollmesh.tasks.verifiers.extraction import LONGEST_CODE, extract_code
from rollmesh.tasks.verifiers.verifier_protocol import RewardParts

_OUTPUT_BYTES = 1 << 20
"""Limit of the standard output of a program."""
_FILE_BYTES = 16 << 20
_MOST_PROGRAMS = 64
"""Programs in one sandbox. The first has it alone, because most wrong answers fail the first test."""
_PRELUDE_SECONDS = 30.0
_Check = Callable[[Any], bool]
"""Comparison of a reported value."""


def _resource_limits(timeout_seconds: float, memory_bytes: int, process_count: int, may_fork: bool) -> ResourceLimits:
    """Return the limits of each process of an answer. Raises ConfigError for values that no answer could run with."""
    if not timeout_seconds > 0 or memory_bytes < 64 << 20 or process_count < 1:
        raise ConfigError(
            f"reward.options: timeout_seconds={timeout_seconds} (> 0), memory_bytes={memory_bytes} (>= 64 MiB), "
            f"process_count={process_count} (>= 1)"
        )
    share = memory_bytes // process_count if may_fork else memory_bytes
    if share < 64 << 20:
        raise ConfigError(
            f"reward.options: may_fork shares memory_bytes={memory_bytes} between process_count={process_count} "
            "processes, and each needs 64 MiB; lower process_count or raise memory_bytes"
        )
    return ResourceLimits(
        address_space_bytes=share,
        cpu_seconds=int(timeout_seconds) + 1,
        process_count=process_count,
        file_bytes=_FILE_BYTES,
        open_file_count=64,
    )


class PythonCodeVerifier:
    """Reward 1 if the code passes every test (or the share of passed tests); 0 for no code, wrong code and time-outs.

    The last fenced block of the response that is tagged as Python is the code; without one, the last block without a
    tag, or the whole response (``extract_code``). It can import the standard library only. Every comparison is made
    outside the sandbox; no expected value is sent into it.
    """

    timeout_means_wrong = True

    def __init__(
        self,
        timeout_seconds: float = 5.0,
        partial_credit: bool = False,
        memory_bytes: int = 512 << 20,
        process_count: int = 16,
        may_fork: bool = False,
        allow_shared_uid: bool = False,
        prelude: str = "",
        tolerance: float = 0.0,
    ) -> None:
        """Create a verifier. Raises ConfigError where code cannot be confined.

        ``timeout_seconds`` is for all tests of one answer together; keep it below reward.timeout_seconds.
        ``memory_bytes`` is for all that an answer runs, without its files (at most 64 MiB). ``process_count``: threads
        that an answer may have at once. ``may_fork``: it may start processes too, each with an equal share of the
        memory. ``allow_shared_uid``: run code even where it could reach every process and file of this user; for
        containers that are used for nothing else. ``prelude``: Python code that runs before each answer, for example
        ``from typing import *`` for answers that annotate with ``List[int]``. ``tolerance``: largest absolute or
        relative difference of a float that an answer prints or returns; with 0, what it prints is compared as text.
        """
        if sys.platform != "linux":
            raise ConfigError("verifier python_code needs Linux: it confines code with namespaces and resource limits")
        if not 0 <= tolerance < 1:
            raise ConfigError(f"reward.options.tolerance={tolerance}: expected 0 to below 1, for example 1e-6")
        if not allow_shared_uid and (reason := Sandbox.unsafe_reason()):
            raise ConfigError(
                f"verifier python_code: {reason}; run the reward service as root or allow user namespaces, or, in a "
                "dedicated container, set reward.options.allow_shared_uid"
            )
        limits = _resource_limits(timeout_seconds, memory_bytes, process_count, may_fork)
        self.sandbox = Sandbox(limits=limits, may_fork=may_fork)
        """Sandbox that runs the functions of the answers."""
        # Its first process forks one for each program, which writes the input to a file and forks the program.
        self._programs = replace(
            self.sandbox,
            may_fork=True,
            limits=replace(limits, process_count=process_count + 2, file_bytes=self.sandbox.scratch_bytes),
            output_bytes=(2 * _OUTPUT_BYTES + 64) * _MOST_PROGRAMS,
        )
        self._program_filter = b""
        with suppress(OSError):  # as in the sandbox itself, which reports the measured level
            self._program_filter = kernel.call_filter(may_fork=may_fork)
        self._timeout_seconds = timeout_seconds
        self._partial_credit = partial_credit
        self._tolerance = tolerance
        self._prelude = prelude
        folder = resources.files("rollmesh.tasks.verifiers")
        self._runner, self._program_runner = (
            (folder / name).read_bytes() for name in ("code_runner.py", "program_runner.py")
        )
        if prelude:
            self._check_prelude()

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> RewardParts:
        """Score one response. Raises VerifierError if the tests are wrong or the machine cannot confine code."""
        tests = read_tests(prompt_metadata)
        code = extract_code(response)
        if not code.strip() or len(code) > LONGEST_CODE:
            return self._reward(0, len(tests), timed_out=False)
        passed, timed_out = 0, False
        try:
            for test_passed in self._results(code, tests, time.monotonic() + self._timeout_seconds):
                passed += test_passed
                if not test_passed and not self._partial_credit:
                    break
        except TimeoutError:
            timed_out = True
        return self._reward(passed, len(tests), timed_out=timed_out)

    def _results(self, code: str, tests: CodeTests, deadline: float) -> Iterator[bool]:
        """Yield True for each passed test and False for each failed one, in order. Raises TimeoutError."""
        if tests.calls or tests.asserts:
            job = {
                "code": code,
                "prelude": self._prelude,
                "entry_point": tests.entry_point,
                "calls": tests.calls,
                "scripts": [test.steps for test in tests.asserts],
            }
            checks: list[_Check | None] = [
                *(partial(same_value, expected, tolerance=self._tolerance) for expected in tests.expected),
                *(partial(_holds, test.passes) if test.checks else None for test in tests.asserts),
            ]
            yield from _checked(self.sandbox, self._runner, json.dumps(job).encode(), checks, deadline)
        begin, count = 0, 1
        most = _MOST_PROGRAMS if tests.programs and self._programs.ends_all_processes() else 1
        while programs := tests.programs[begin : begin + count]:
            program_job = self._program_job(code, [stdin for stdin, _ in programs])
            checks = [partial(_prints, stdout, self._tolerance) for _, stdout in programs]
            yield from _checked(self._programs, self._program_runner, program_job, checks, deadline)
            begin, count = begin + count, min(8 * count, most)

    def _program_job(self, code: str, inputs: list[str]) -> bytes:
        texts = [text.encode("utf-8", "replace") for text in inputs]
        script = code.encode("utf-8", "replace")
        lengths = [len(text) for text in texts]
        header = marshal.dumps((script, self._prelude, lengths, _OUTPUT_BYTES, _FILE_BYTES, self._program_filter))
        return b"".join((len(header).to_bytes(4, "big"), header, *texts))

    def _check_prelude(self) -> None:
        result = self._programs.run(self._program_runner, self._program_job("", [""]), _PRELUDE_SECONDS)
        if "value" not in _reports(result.stdout).get(0, {}):
            lines = result.stderr.decode("utf-8", "replace").strip().splitlines()
            raise ConfigError(f"reward.options.prelude: it fails: {lines[-1] if lines else 'it does not end'}")

    def _reward(self, passed: int, total: int, *, timed_out: bool) -> RewardParts:
        value = passed / total if self._partial_credit else float(passed == total)
        return RewardParts(value=value, parts={"tests_passed": passed, "tests": total, "timed_out": float(timed_out)})


def _checked(
    sandbox: Sandbox,
    runner: bytes,
    job: bytes,
    checks: Sequence[_Check | None],
    deadline: float,
) -> Iterator[bool]:
    """Run a job, and yield the result of each check of a reported value. Raises TimeoutError."""
    if (remaining := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    result = sandbox.run(runner, job, remaining)
    reports = _reports(result.stdout)
    for number, check in enumerate(checks):
        if check is None:
            continue
        if number not in reports and result.timed_out:
            raise TimeoutError
        report = reports.get(number, {})
        yield "value" in report and check(report["value"])


def _holds(passes: Callable[[list[Any]], bool], reported: Any) -> bool:
    values = _read(reported)
    return isinstance(values, list) and passes(values)


def _prints(stdout: str, tolerance: float, reported: Any) -> bool:
    output = _read(reported)
    return isinstance(output, bytes) and same_output(stdout, output.decode("utf-8", "replace"), tolerance)


def _read(reported: Any) -> Any:
    """Return a reported value; None for a report that the answer wrote and the runner would not write."""
    try:
        return read_value(reported)
    except Exception:
        return None


def _reports(output: bytes) -> dict[int, dict[str, Any]]:
    """Return the results by test number; the first line about a test counts."""
    reports: dict[int, dict[str, Any]] = {}
    for line in output.decode("utf-8", "replace").splitlines():
        number, _, result = line.partition(" ")
        if number.isascii() and number.isdigit() and len(number) < 10:
            try:
                report = json.loads(result)
            except (ValueError, RecursionError):
                continue
            if isinstance(report, dict):
                reports.setdefault(int(number), report)
    return reports
