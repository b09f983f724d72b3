"""Fixtures of the reward tests: a model folder, verifiers that misbehave, a pool, a running service."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.config.load import validate_run_config
from rollmesh.config.run import RunConfig
from rollmesh.reward.main import serve
from rollmesh.reward.messages import worker_spec
from rollmesh.reward.reward_metrics import RewardMetrics
from rollmesh.reward.reward_service import Scoring
from rollmesh.reward.worker_pool import WorkerPool
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.runtime.metrics import Metrics
from rollmesh.text import Tokenizer
from rollmesh.types import Prompt, RewardOutcome, Trajectory
from rollmesh.wire.reward_messages import score_item_to_pb

from ...kit.answers import answer, byte_tokenizer, written
from ...kit.waiting import reached

POISONOUS = '''
"""A verifier that does what the answer says."""
import contextlib, ctypes, math, os, re, signal, sys, time
from rollmesh.reward.messages import frame
from rollmesh.tasks.verifiers.verifier_protocol import RewardParts
from rollmesh.types import OutcomeKind, RewardOutcome
from rollmesh.wire.reward_messages import outcome_to_bytes

def verify(response, metadata):
    word, _, rest = response.partition(" ")
    match word:
        case "value": return float(rest)
        case "parts": return RewardParts(value=1.0, parts={"a": 0.25, "length": len(rest)})
        case "pid": return os.getpid()
        case "uid": return os.getuid() / 8  # a reward is at most 1e9
        case "length": return len(response)
        case "metadata": return metadata["n"] * 2 if type(metadata["n"]) is int else -1
        case "sleep": time.sleep(float(rest)); return 1.0
        case "held":
            with contextlib.suppress(FileExistsError):  # of another worker, maybe with another uid
                open(rest + ".begun", "x").close()
            while not os.path.exists(rest): time.sleep(0.01)
            return 1.0
        case "read": return len(open(rest).read())
        case "signal": os.kill(int(rest), 0); return 1.0
        case "children":
            count = 0
            try:
                while count < 500:
                    if os.fork() == 0: time.sleep(30)
                    count += 1
            except OSError: pass
            return count
        case "loop":
            while True: pass
        case "stuck": return 9 ** 9 ** 8 % 7
        case "backtrack": return bool(re.match(r"(a+)+$", "a" * 64 + "b"))
        case "memory":
            hoard = []
            while True: hoard.append(bytearray(1 << 24))
        case "fork":
            while True:
                try: os.fork()
                except OSError: pass
        case "daemon":
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0: time.sleep(1000)
                os._exit(0)
            time.sleep(1000)
        case "crash": ctypes.string_at(0)
        case "kill": os.kill(os.getpid(), signal.SIGKILL)
        case "exit": sys.exit(0)
        case "hard_exit": os._exit(0)
        case "close": os.closerange(3, 99); time.sleep(1000)
        case "garbage":
            for n in range(3, 99):
                try: os.write(n, b"\\xff" * 4096)
                except OSError: pass
            time.sleep(1000)
        case "forge":
            data = frame(outcome_to_bytes(RewardOutcome(kind=OutcomeKind.SCORED, value=9.0))) * 2
            for n in range(3, 99):
                try: os.write(n, data)
                except OSError: pass
        case "nan": return math.nan
        case "string": return "1.0"
        case "raise": raise RuntimeError("on purpose: " + rest)
        case "deep":
            def down(n): return down(n + 1)
            return down(0)
        case "timeout": raise TimeoutError("my own limit")
        case "print": print("x" * 100000); return 1.0
    return 0.0

def wrong_when_late(response, metadata):
    return verify(response, metadata)
wrong_when_late.timeout_means_wrong = True
'''


WAIT_SECONDS = 60.0
"""Time for answers whose time-out is not the point: a machine that stalls is no fault of theirs."""
IN_TIME_SECONDS = 4.0
"""Limit under which one answer is late and its neighbours are not, on a machine that may stall for a moment."""


@dataclass(frozen=True)
class Gate:
    """Holds the verifier back: ``held PATH`` says when it has begun, and ends once the gate is open."""

    file: Path

    @property
    def answer(self) -> str:
        """The answer that waits here."""
        return f"held {self.file}"

    @property
    def _mark(self) -> Path:
        return Path(f"{self.file}.begun")

    @property
    def has_begun_again(self) -> bool:
        """True if a verifier has come here since the last ``begun``."""
        return self._mark.exists()

    async def begun(self) -> None:
        """Wait until a verifier waits here; the next call waits for the next verifier."""
        await reached(self._mark.exists, "a verifier that begins with the answer", WAIT_SECONDS)
        self._mark.unlink()

    def open(self) -> None:
        """Let go whatever waits here, now or later."""
        self.file.touch()


@contextmanager
def gate() -> Iterator[Gate]:
    """A gate in a folder that workers with a uid of their own can write to; open at the end."""
    with tempfile.TemporaryDirectory(prefix="gate-") as folder:
        Path(folder).chmod(0o777)
        made = Gate(Path(folder) / "open")
        try:
            yield made
        finally:
            made.open()


def make_config(folder: Path, source: dict[str, Any] | None = None, **reward: Any) -> RunConfig:
    """A run whose reward section is the point; its tokenizer has one token per byte."""
    model = folder / "model"
    if not model.is_dir():
        model.mkdir(parents=True)
        byte_tokenizer().save(str(model / "tokenizer.json"))
        (model / "config.json").write_text(json.dumps({"vocab_size": 256}))
    settings = {
        "name": "reward-test",
        "folder": str(folder / "run"),
        "model": {"path": str(model)},
        "reward": {"timeout_seconds": WAIT_SECONDS, "workers": 2, "memory_limit_bytes": 256 << 20, **reward},
        "data": {"source": source or {"type": "jsonl", "path": "unused"}},
    }
    return validate_run_config(settings, "test")


class Answers:
    """Makes trajectories and encoded items from text."""

    def __init__(self, config: RunConfig) -> None:
        self._tokenizer = Tokenizer(config.model.path)

    def trajectory(self, response: str, metadata: dict[str, Any] | None = None, verifier: str = "") -> Trajectory:
        """A finished trajectory whose policy wrote ``response``."""
        asked = self._tokenizer.encode("question")
        prompt = Prompt(prompt_id="p", token_ids=asked, verifier=verifier, metadata=metadata or {})
        return answer(prompt, written(self._tokenizer.encode(response)))

    def payload(self, response: str, metadata: dict[str, Any] | None = None, verifier: str = "") -> bytes:
        """The same, as a worker gets it."""
        return score_item_to_pb(self.trajectory(response, metadata, verifier)).SerializeToString()


class ScoringBench:
    """A real pool of worker processes and the scoring in front of it."""

    def __init__(
        self,
        config: RunConfig,
        pool: WorkerPool,
        metrics: RewardMetrics,
        registry: Metrics,
        failures: list[BaseException],
    ) -> None:
        self.pool = pool
        self.failures = failures
        self._registry = registry
        self._answers = Answers(config)
        self._scoring, self._patient = (
            Scoring(
                pool,
                {},
                metrics,
                default_verifier=config.reward.verifier,
                timeout_seconds=seconds,
                on_unusable_verifier=self.failures.append,
            )
            for seconds in (config.reward.timeout_seconds, WAIT_SECONDS)
        )

    async def score(self, response: str, metadata: dict[str, Any] | None = None, verifier: str = "") -> RewardOutcome:
        """Score one answer, however long that takes on a busy machine."""
        return await self._patient.score(verifier, self._answers.payload(response, metadata, verifier))

    async def score_in_time(self, response: str) -> RewardOutcome:
        """Score one answer within the time that the run file gives."""
        return await self._scoring.score("", self._answers.payload(response))

    async def score_all(self, responses: Sequence[str]) -> list[RewardOutcome]:
        """Score answers at once."""
        return list(await asyncio.gather(*(self.score(response) for response in responses)))

    def sample(self, name: str, **labels: str) -> float:
        """A metric's value."""
        return self._registry.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def scoring_bench(config: RunConfig) -> AsyncIterator[ScoringBench]:
    """Run a pool for ``config``."""
    registry = Metrics("reward")
    metrics, failures = RewardMetrics(registry), list[BaseException]()
    async with WorkerPool(worker_spec(config), config.reward.workers, metrics, failures.append) as pool:
        yield ScoringBench(config, pool, metrics, registry, failures)


@asynccontextmanager
async def running_service(config: RunConfig, index: int = 0) -> AsyncIterator[Endpoint]:
    """Run a whole reward service in this process until the block ends."""
    shutdown = asyncio.Event()
    task = asyncio.create_task(serve(config, index, shutdown))
    try:
        found = await reached(
            lambda: [e for e in read_endpoints(Path(config.folder), "reward") if e.index == index],
            "the service",
            WAIT_SECONDS,
            check=lambda: task.done() and task.result(),
        )
        yield found[0]
    finally:
        shutdown.set()
        await asyncio.wait_for(task, WAIT_SECONDS)
