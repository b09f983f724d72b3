"""The SGLang server of the engine: start or connect, probe, pause and continue, load weights."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmesh.errors import ConfigError, EngineError
from rollmesh.generator.engines.engine_protocol import EngineLost
from rollmesh.generator.engines.sglang.server_api import HttpError, SglangApi
from rollmesh.generator.engines.sglang.server_process import ServerProcess, write_private
from rollmesh.generator.engines.sglang.sglang_options import SglangOptions
from rollmesh.runtime.addresses import free_port
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import cancel_and_wait

_POLL_SECONDS = 0.25
_PROBE_TIMEOUT_SECONDS = 20.0
_MAX_MISSED_PROBES = 3
_STOP_GRACE_SECONDS = 2.0
"""Time between SIGTERM and SIGKILL; a server that is stopped has no request left to finish."""
_EXIT_SECONDS = 1.0
_UNCHANGED_MESSAGES = ("Failed to get weights iterator", "Failed to get model loader")
"""Error messages of a server that failed before it wrote a single weight."""
_WRONG_KEY = frozenset({401, 403})


class SglangServer:
    """One SGLang deployment; ``lost`` is called once if it dies or its state is unknown."""

    def __init__(self, options: SglangOptions, lost: Callable[[EngineLost], None]) -> None:
        self._options = options
        self._lost = lost
        self._process: ServerProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._api: SglangApi | None = None
        self._log = get_logger("sglang")
        self._loads = 0
        self._found = ""
        """Name of the weights of a server whose weights this process leaves as they are."""
        self._updating = False
        self.clock = RunningClock()
        """Clock of the request deadlines; stopped while the server is paused."""
        self.adapter_targets: Sequence[str] = ()
        """Names of the layers that adapters change."""
        self.policy_version = -1
        """Version of the weights in the server."""
        self.known_versions: set[int] = set()
        """Every version that this engine has sent to the server; tokens of any other version are rejected."""
        self.doubtful_versions: set[int] = set()
        """Versions whose load was cancelled; the server may have these weights unchecked."""
        self.kv_token_capacity = 0
        self.retracting_pauses = 0
        """Pauses that took the running requests out of the batch."""

    @property
    def paused(self) -> bool:
        return self.clock.stopped

    @property
    def api(self) -> SglangApi:
        """HTTP client of the server; EngineError before ``start``."""
        if self._api is None:
            raise EngineError("the engine has not been started")
        return self._api

    async def start(self, folder: Path, policy_version: int) -> None:
        """Start the server on ``folder``, or connect and load ``folder``; EngineLost if it is not ready in time."""
        options = self._options
        self.known_versions.add(policy_version)
        try:
            self._process = self._launch(folder, policy_version) if options.server.url is None else None
            self._api = self._api or SglangApi(str(options.server.url), options.admin_key)
            await self._until_up()
        finally:
            options.key_file.unlink(missing_ok=True)
        info = await self.api.server_info()
        self.kv_token_capacity = options.cache_tokens(info, self.api.url, self.adapter_targets)
        self._log.info(
            "server_ready",
            url=self.api.url,
            version=info.get("version"),
            kv_token_capacity=self.kv_token_capacity,
            max_running_requests=info.get("max_running_requests"),
            speculative_algorithm=info.get("speculative_algorithm"),
        )
        if self._is_foreign:
            self._found = await self._found_weights(folder)
        elif options.server.url is not None:
            await self.pause("retract")
            await self._update(folder, policy_version, flush=True)
            await self.resume()
        self.policy_version = policy_version
        self._watch = asyncio.create_task(self._probe_until_lost(), name="sglang-watch")

    @property
    def _is_foreign(self) -> bool:
        """True if others have loaded the weights, which this process leaves as they are."""
        return self._options.frozen and self._options.server.url is not None

    async def _found_weights(self, folder: Path) -> str:
        """Return the name of the weights of a running server; ConfigError unless they are those of ``folder``."""
        info = await self.api.model_info(_PROBE_TIMEOUT_SECONDS)
        path = str(info.get("model_path"))
        if not _same_folder(path, folder):
            raise ConfigError(
                f"generator.sglang.url={self.api.url}: the server has the model {path}, expected {folder}; start it "
                "with --model-path and that folder"
            )
        return self._name_of_weights(info)

    def _name_of_weights(self, info: Mapping[str, Any]) -> str:
        version = str(info.get("weight_version"))
        return f"{version} of {info.get('model_path')}" if self._is_foreign else version

    def _launch(self, folder: Path, policy_version: int) -> ServerProcess:
        options, port = self._options, free_port()
        self._api = SglangApi(f"http://127.0.0.1:{port}", options.admin_key)
        if options.admin_key is not None:
            write_private(options.key_file, options.key_text())
        command = options.command(folder, policy_version, port, self.adapter_targets)
        process = ServerProcess(command, options.server_environment(dict(os.environ)), options.log_file)
        self._log.info("server_started", pid=process.pid, url=self._api.url, log=str(options.log_file))
        return process

    async def aclose(self) -> None:
        """Stop probing, and stop the server if this process started it; a server at a url continues."""
        if self._watch is not None:
            await cancel_and_wait(self._watch)
        if self._process is not None:
            await self._process.stop(_STOP_GRACE_SECONDS)
        elif self.paused:
            with contextlib.suppress(EngineError):
                await self.resume()
        if self._api is not None:
            await self._api.aclose()

    async def pause(self, mode: str) -> None:
        """Hold the running requests: ``in_place``, or ``retract`` to drop their cache too."""
        self.retracting_pauses += mode == "retract"
        await self._send_control(self.api.pause(mode))
        self.clock.stop()

    async def resume(self) -> None:
        await self._send_control(self.api.resume())
        self.clock.start()

    async def _send_control(self, request: Coroutine[Any, Any, None]) -> None:
        """Send a pause or continue request; a failure loses the server, because its state is unknown."""
        try:
            await request
        except EngineError as error:
            lost = EngineLost(str(await self.explain(error)))
            self._lost(lost)
            raise lost from error

    async def load(self, folder: Path, policy_version: int, *, flush: bool) -> None:
        """Change the weights of the paused server.

        Raises EngineError if the server rejects them and keeps the old ones, EngineLost if its weights are unknown.
        They are also unknown after a cancellation: tokens sampled from the new weights are then rejected.
        """
        self.known_versions.add(policy_version)
        self._updating = True
        self._loads += 1
        try:
            await self._update(folder, policy_version, flush=flush)
        except EngineLost as error:
            self._lost(error)
            raise
        except asyncio.CancelledError:
            self.doubtful_versions.add(policy_version)
            raise
        finally:
            self._updating = False
        self.doubtful_versions.discard(policy_version)
        self.policy_version = policy_version

    async def explain(self, error: EngineError) -> EngineError:
        """Return EngineLost if the server has just died, else the error itself."""
        if self._process is None:
            return error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_SECONDS):
                return self._exit_error(await self._process.ended())
        return error

    def unknown_version_error(self, version: str) -> EngineLost:
        return EngineLost(
            f"the SGLang server at {self.api.url} serves policy version {version}, which this generator has not loaded "
            f"(it loaded {self.policy_version}): the server was restarted, or another client loads weights into it; "
            "give each generator its own server"
        )

    async def _update(self, folder: Path, policy_version: int, *, flush: bool) -> None:
        seconds = self._options.server.update_timeout_seconds
        try:
            message = await self.api.update_weights(str(folder), str(policy_version), flush=flush, seconds=seconds)
            reported = str((await self.api.model_info(_PROBE_TIMEOUT_SECONDS)).get("weight_version"))
        except EngineError as error:
            raise EngineLost(f"loading policy version {policy_version}: {await self.explain(error)}") from error
        if message and nothing_changed(message, reported, self.policy_version):
            raise EngineError(f"the SGLang server rejects policy version {policy_version}: {message}")
        if message:
            raise EngineLost(f"the SGLang server loaded policy version {policy_version} in part: {message}")
        if reported != str(policy_version):
            raise EngineLost(f"the SGLang server loaded policy version {policy_version} but reports {reported}")

    async def _until_up(self) -> None:
        limit = self._options.server.start_timeout_seconds
        deadline = time.monotonic() + limit
        while (problem := await self._startup_problem()) is not None:
            if self._process is not None and not self._process.alive:
                raise self._exit_error(await self._process.ended())
            if time.monotonic() > deadline:
                reason = problem if self._process is None else self._process.log_tail()
                raise EngineLost(
                    f"the SGLang server was not ready within generator.sglang.start_timeout_seconds={limit:g}: {reason}"
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def _startup_problem(self) -> str | None:
        """Return the reason that the server is not up yet, or None.

        A server that this process started is up once it accepts requests. A server at a url may be paused.
        """
        if self._process is not None:
            ready = await self.api.ready(_PROBE_TIMEOUT_SECONDS)
            return None if ready else "not ready"
        try:
            await self.api.model_info(_PROBE_TIMEOUT_SECONDS)
        except HttpError as error:
            if error.status in _WRONG_KEY:
                raise ConfigError(
                    f"generator.sglang.admin_key: the SGLang server at {self.api.url} rejects it: {error}"
                ) from error
            return str(error)
        except EngineError as error:
            return str(error)
        return None

    async def _probe_until_lost(self) -> None:
        """Probe the server until it dies, does not answer or has unknown weights, and report that as lost.

        A paused server answers probes.
        """
        missed = 0
        while True:
            if self._process is None:
                await asyncio.sleep(self._options.probe_seconds)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._options.probe_seconds):
                        await self._process.ended()
            if self._process is not None and not self._process.alive:
                self._lost(self._exit_error(await self._process.ended()))
                return
            loads = self._loads
            try:
                info = await self.api.model_info(_PROBE_TIMEOUT_SECONDS)
                missed = 0
            except EngineError as error:
                missed += 1
                self._log.warning("server_does_not_answer", missed=missed, message=str(error))
                if missed >= _MAX_MISSED_PROBES:
                    self._lost(EngineLost(f"the SGLang server at {self.api.url} does not answer: {error}"))
                    return
            else:
                reported = self._name_of_weights(info)
                settled = loads == self._loads and not self._updating and not self.doubtful_versions
                if settled and reported != (self._found or str(self.policy_version)):
                    changed = f"the SGLang server at {self.api.url}: its weights have changed: {reported}"
                    self._lost(EngineLost(changed) if self._is_foreign else self.unknown_version_error(reported))
                    return

    def _exit_error(self, status: int) -> EngineLost:
        assert self._process is not None
        return EngineLost(f"the SGLang server ended with status {status}; {self._process.log_tail()}")


class RunningClock:
    """Clock that counts the seconds during which it is not stopped."""

    def __init__(self) -> None:
        self._passed = 0.0
        self._since: float | None = time.monotonic()

    @property
    def stopped(self) -> bool:
        return self._since is None

    def seconds(self) -> float:
        return self._passed if self._since is None else self._passed + time.monotonic() - self._since

    def stop(self) -> None:
        self._passed, self._since = self.seconds(), None

    def start(self) -> None:
        if self._since is None:
            self._since = time.monotonic()


def _same_folder(path: str, folder: Path) -> bool:
    return Path(path).resolve() == folder.resolve()


def nothing_changed(message: str, reported_version: str, version_before: int) -> bool:
    """Tell whether a failed update certainly left the old weights in place.

    The server reports a rollback after an update that failed half-way, but it reads the weights for the rollback from
    the folder that it could not load. The state of the server is then unknown.
    """
    return message.startswith(_UNCHANGED_MESSAGES) and reported_version == str(version_before)
