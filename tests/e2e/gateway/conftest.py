"""A real gateway over a real queue that moves, and a real browser in front of it."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import pytest
import yaml

from rollmesh.config import load_run_config
from rollmesh.runtime.addresses import free_port
from rollmesh.store import EmbeddedOptions, EmbeddedServer, TrajectoryStore

from ...kit.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Locator, Page
    from playwright.sync_api._generated import LocatorAssertions

T = TypeVar("T")

TOKEN = "token-of-the-page-tests"
FEEDER = Path(__file__).parent / "feeder.py"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE = {"width": 1440, "height": 900}
NARROW = {"width": 390, "height": 844}
_SECONDS = 300.0
"""For whatever takes moments on an idle machine."""


@dataclass
class Scene:
    """A queue, what keeps it moving, and the gateway in front of it."""

    run_file: Path
    port: int
    sample_seconds: float
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    holding: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def get(self, path: str) -> Any:
        """One answer of the API."""
        return httpx.get(f"{self.url}api/v1/{path}", timeout=_SECONDS).raise_for_status().json()

    def in_store(self, look: Callable[[TrajectoryStore], Awaitable[T]]) -> T:
        """What the store itself says, on a connection of its own; not in this thread, where the browser's loop runs."""

        async def asked() -> T:
            config = load_run_config(self.run_file, ())
            async with await TrajectoryStore.connect(config.store, config.name) as store:
                return await look(store)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: asyncio.run(asked())).result(timeout=_SECONDS)

    def start_feeder(self, *arguments: str) -> None:
        self._start("feeder", [sys.executable, str(FEEDER), str(self.run_file), *arguments])
        self._hear("feeding")

    def hold(self) -> None:
        """Let the queue stand still: nothing that it lists is trained, evicted or replaced."""
        if not self.holding:
            self.processes["feeder"].send_signal(signal.SIGUSR1)
            self._hear("holding")
            self.holding = True

    def go_on(self) -> None:
        """Let the queue move again."""
        if self.holding:
            self.processes["feeder"].send_signal(signal.SIGUSR2)
            self._hear("feeding")
            self.holding = False

    def _hear(self, word: str) -> None:
        """Wait for a word of the feeder."""
        output = self.processes["feeder"].stdout
        assert output is not None
        line = output.readline()
        assert line == f"{word}\n", line + output.read()

    def start_gateway(self, name: str = "gateway", **settings: object) -> str:
        """Another gateway of the run, or the first one; its URL."""
        changes = [word for key, value in settings.items() for word in ("--set", f"gateway.{key}={value}")]
        command = [sys.executable, "-m", "rollmesh.cli.main", "gateway", str(self.run_file), *changes]
        process = self._start(name, command, log=self.run_file.parent / f"{name}.log")
        url = f"http://127.0.0.1:{settings.get('port', self.port)}/"
        until(lambda: self._answers(process, url), f"the first look of {name}")
        return url

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=_SECONDS)

    def _answers(self, process: subprocess.Popen[str], url: str) -> bool:
        assert process.poll() is None, [log.read_text() for log in self.run_file.parent.glob("*.log")]
        headers = {"Authorization": f"Bearer {TOKEN}"}
        try:
            return httpx.get(f"{url}api/v1/overview", headers=headers, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def _start(self, name: str, command: list[str], log: Path | None = None) -> subprocess.Popen[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if log is None:
            process = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        else:
            with log.open("a") as output:
                process = subprocess.Popen(command, env=env, text=True, stdout=output, stderr=subprocess.STDOUT)
        self.processes[name] = process
        return process


@contextmanager
def scene_of(folder: Path, rollouts: int, *, still: bool = False, sample_seconds: float = 0.2) -> Iterator[Scene]:
    """A scene with its own Redis, ended with everything that it started."""
    redis = EmbeddedServer(folder / "redis", EmbeddedOptions(maxmemory_bytes=1 << 29))
    redis.start()
    scene = Scene(folder / "run.yaml", free_port(), sample_seconds)
    try:
        scene.run_file.write_text(yaml.safe_dump(_run_file(folder, scene, redis.url, rollouts)))
        scene.start_feeder("--rollouts", str(rollouts), *(["--still"] if still else []))
        scene.start_gateway()
        yield scene
    finally:
        for name in list(scene.processes):
            scene.stop(name)
        redis.kill()


def _run_file(folder: Path, scene: Scene, redis_url: str, rollouts: int) -> dict[str, Any]:
    return {
        "name": "page",
        "folder": str(folder / "run"),
        "model": {"path": "recipe:countdown"},
        "data": {"source": {"type": "countdown"}, "max_prompt_tokens": 64},
        "schedule": {
            "preset": "copris",
            "groups_per_batch": max(8, rollouts // 16),
            "group_size": 8,
            "pool_size": rollouts,
            "max_staleness": 4,
        },
        "rollout": {"max_new_tokens": 512},
        "generator": {"max_context_tokens": 640},
        "reward": {"verifier": "countdown"},
        "trainer": {"train_steps": 100_000},  # however slow the tests, the run does not end before
        "store": {"url": redis_url, "session_ttl_seconds": _SECONDS},  # however long the feeder is not scheduled
        "gateway": {
            "port": scene.port,
            "token": TOKEN,
            "sample_seconds": scene.sample_seconds,
            "timeline_rollouts": max(1000, min(16_384, 3 * rollouts // 2)),
        },
    }


@contextmanager
def viewing(folder: Path, *options: str, **environment: str) -> Iterator[str]:
    """Serve a run folder with ``rollmesh view``; yields the link to the page, with its token."""
    command = [sys.executable, "-m", "rollmesh.cli.main", "view", str(folder), *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("the run as a page: http://127.0.0.1:"), line + process.stdout.read()
        yield line.split(": ", 1)[1].strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=_SECONDS)


@pytest.fixture(scope="package")
def browser() -> "Iterator[Browser]":
    """Debian's Chromium; the tests skip where it, or the package that drives it, is missing."""
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make setup")
    sync_api.expect.set_options(timeout=1000 * _SECONDS)
    with sync_api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=executable, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def scene(browser: "Browser", tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """About a hundred rollouts in flight, a train step every few seconds."""
    with scene_of(tmp_path_factory.mktemp("scene"), 96) as moving:
        yield moving


@pytest.fixture
def at_rest(scene: Scene) -> Iterator[Scene]:
    """The scene once it has everything to show, standing still for the length of a test.

    In a queue that moves a trajectory may be trained, and gone, between the look at a list and the press of its button.
    """
    until(lambda: bool(scene.get("overview")["evaluations"]), "the first evaluation")
    scene.hold()
    yield scene
    scene.go_on()


def expect(shown: "Locator") -> "LocatorAssertions":
    """Assert by waiting: whatever follows a fetch, a queued event or a frame may come at any time after it."""
    from playwright.sync_api import expect as assertions

    return assertions(shown)


def ask(url: str, **options: Any) -> httpx.Response:
    """Send a GET request with the timeout of the page tests."""
    return httpx.get(url, timeout=_SECONDS, **options)


def show_section(page: "Page", name: str) -> None:
    """Follow a link of the navigation; a phone shows one section at a time, and only once the address has changed."""
    link = page.get_by_role("link", name=name, exact=True)
    link.click()
    expect(link).to_have_attribute("aria-current", "true")


class Window:
    """One page with what it asked for and complained about."""

    def __init__(self, context: "BrowserContext", url: str) -> None:
        self.page: Page = context.new_page()
        self.url = url
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._meant: tuple[str, ...] = ()
        self.page.set_default_timeout(1000 * _SECONDS)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self._heard(message.type, message.text))

    def expect(self, *words: str) -> None:
        """Complaints with one of these words are meant, whenever they come."""
        self._meant += words

    @property
    def unexpected(self) -> list[str]:
        """Complaints that nobody meant to cause."""
        return [text for text in self.complaints if not any(words in text for words in self._meant)]

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")

    def open(self, looks: int = 2) -> "Page":
        """Load the page and wait until it shows the run; one that has ended is drawn once."""
        self.page.goto(self.url)
        self.wait_for_looks(looks)
        return self.page

    def wait_for_looks(self, looks: int) -> None:
        """Until so many looks have been drawn since the page was loaded."""
        self.page.wait_for_function(
            "looks => Number(document.documentElement.dataset.looks) >= looks",
            arg=looks,
            timeout=1000 * (_SECONDS + 3 * looks),
        )

    def fact(self, name: str) -> str:
        """The value of one of the run's facts."""
        text = self.page.locator("#facts > div", has_text=name).locator("dd").first.text_content()
        return text or ""

    def step(self) -> int:
        return int(re.sub(r"\D", "", self.fact("Train step")) or 0)


@pytest.fixture
def window(browser: "Browser", scene: Scene) -> Iterator[Callable[..., Window]]:
    """Open windows on the scene; at the end none of them may have complained about anything."""
    opened: list[tuple[BrowserContext, Window]] = []

    def open_window(url: str = scene.url, **options: Any) -> Window:
        # Without smooth scrolling a place on the page is where it was measured.
        usual = {"viewport": WIDE, "color_scheme": "light", "reduced_motion": "reduce"}
        context = browser.new_context(**{**usual, **options})
        opened.append((context, Window(context, url)))
        return opened[-1][1]

    yield open_window
    for context, _ in opened:
        context.close()
    assert [complaint for _, one in opened for complaint in one.unexpected] == []
