"""The server behind the engine: started or found, watched, paused and continued, given new weights."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rollmesh.errors import ConfigError, EngineError
from rollmesh.generator.engines.protocol import EngineLost
from rollmesh.generator.engines.sglang.api import SglangApi
from rollmesh.generator.engines.sglang.options import SPARE_TOKENS, SglangOptions
from rollmesh.generator.engines.sglang.process import ServerProcess, free_port, write_private
from rollmesh.generator.engines.sglang.reload import nothing_changed
from rollmesh.runtime.logging import get_logger

_LOOK_SECONDS = 0.25
_LOOK_TIMEOUT_SECONDS = 20.0
_MOST_MISSED_LOOKS = 3
_STOP_GRACE_SECONDS = 2.0
"""A server that is stopped has no request left to finish."""
_LAST_WORDS_SECONDS = 1.0


class SglangServer:
    """One SGLang deployment; ``lost`` is called once when it is gone or in an unknown state."""

    def __init__(self, options: SglangOptions, lost: Callable[[EngineLost], None]) -> None:
        self._options = options
        self._lost = lost
        self._process: ServerProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._api: SglangApi | None = None
        self._log = get_logger("sglang")
        self.paused = False
        self.policy_version = -1
        """Version of the weights in it."""
        self.kv_token_capacity = 0

    @property
    def api(self) -> SglangApi:
        """Its endpoints."""
        if self._api is None:
            raise EngineError("the engine has not been started")
        return self._api

    async def start(self, folder: Path, policy_version: int) -> None:
        """Start it on ``folder``, or find it and load ``folder``; EngineLost when it does not come up."""
        options = self._options
        if options.url is None:
            port = free_port()
            self._api = SglangApi(f"http://127.0.0.1:{port}", options.admin_key)
            if options.admin_key is not None:
                write_private(options.key_file, options.key_text())
            command = options.command(folder, policy_version, port)
            self._process = ServerProcess(command, options.server_environment(dict(os.environ)), options.log_file)
            self._log.info("server_started", pid=self._process.pid, url=self._api.url, log=str(options.log_file))
        else:
            self._api = SglangApi(options.url, options.admin_key)
        try:
            await self._until_up()
        finally:
            options.key_file.unlink(missing_ok=True)
        await self._check_settings()
        if options.url is not None:
            await self.pause("retract")
            await self._update(folder, policy_version, flush=True)
            await self.resume()
        self.policy_version = policy_version
        self._watch = asyncio.create_task(self._keep_watch(), name="sglang-watch")

    async def aclose(self) -> None:
        """Stop watching; end the server if it is ours, let it go on if it is not."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._process is not None:
            await self._process.stop(_STOP_GRACE_SECONDS)
        elif self.paused:
            with contextlib.suppress(EngineError):
                await self.resume()
        if self._api is not None:
            await self._api.aclose()

    async def pause(self, mode: str) -> None:
        """Hold its running requests: ``in_place``, or ``retract`` to drop their cache too."""
        await self._control(self.api.pause(mode))
        self.paused = True

    async def resume(self) -> None:
        """Let it go on."""
        await self._control(self.api.resume())
        self.paused = False

    async def _control(self, request: Coroutine[Any, Any, None]) -> None:
        """A server that cannot be paused or continued any more is lost: nobody knows whether it is held."""
        try:
            await request
        except EngineError as error:
            lost = EngineLost(str(await self.explained(error)))
            self._lost(lost)
            raise lost from error

    async def load(self, folder: Path, policy_version: int, *, flush: bool) -> None:
        """Change the weights of the paused server.

        EngineError when it refuses and goes on with the old ones, EngineLost when nobody knows which it has.
        """
        try:
            await self._update(folder, policy_version, flush=flush)
        except EngineLost as error:
            self._lost(error)
            raise
        self.policy_version = policy_version

    async def explained(self, error: EngineError) -> EngineError:
        """What a failed request means: the end of the server, if it has just died, else the error itself."""
        if self._process is None:
            return error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                return self._obituary(await self._process.ended())
        return error

    async def _update(self, folder: Path, policy_version: int, *, flush: bool) -> None:
        seconds = self._options.update_timeout_seconds
        try:
            message = await self.api.update_weights(str(folder), str(policy_version), flush=flush, seconds=seconds)
            reported = str((await self.api.model_info(_LOOK_TIMEOUT_SECONDS)).get("weight_version"))
        except EngineError as error:
            raise EngineLost(f"loading policy version {policy_version}: {await self.explained(error)}") from error
        if message and nothing_changed(message, reported, self.policy_version):
            raise EngineError(f"the SGLang server refuses policy version {policy_version}: {message}")
        if message:
            raise EngineLost(f"the SGLang server loaded policy version {policy_version} in part: {message}")
        if reported != str(policy_version):
            raise EngineLost(f"the SGLang server took policy version {policy_version} and reports {reported}")

    async def _until_up(self) -> None:
        limit = self._options.start_timeout_seconds
        deadline = time.monotonic() + limit
        while not await self._answers():
            if self._process is not None and not self._process.alive:
                raise self._obituary(await self._process.ended())
            if time.monotonic() > deadline:
                where = self._process.last_words() if self._process is not None else f"nothing at {self.api.url}"
                raise EngineLost(
                    f"the SGLang server was not ready within generator.sglang.start_timeout_seconds={limit:g}: {where}"
                )
            await asyncio.sleep(_LOOK_SECONDS)

    async def _answers(self) -> bool:
        """A server of ours is up when it takes requests; one at a url may have been left paused."""
        if self._process is not None:
            return await self.api.ready(_LOOK_TIMEOUT_SECONDS)
        try:
            await self.api.model_info(_LOOK_TIMEOUT_SECONDS)
        except EngineError:
            return False
        return True

    async def _check_settings(self) -> None:
        info = await self.api.server_info()
        self.kv_token_capacity = int(info.get("max_total_num_tokens") or 0)
        need = self._options.max_context_tokens + SPARE_TOKENS
        context = info.get("context_length")
        if self._process is None and isinstance(context, int) and context < need:
            raise ConfigError(
                f"the SGLang server at {self.api.url} has --context-length {context}; "
                f"generator.max_context_tokens={self._options.max_context_tokens} needs {need}"
            )
        overlaps = info.get("disable_overlap_schedule") is False
        if self._process is None and self._options.on_new_version == "keep_kv" and overlaps:
            raise ConfigError(
                f"generator.on_new_version=keep_kv: the SGLang server at {self.api.url} must run with "
                "--disable-overlap-schedule, or a token in flight is stamped with the wrong policy version"
            )
        self._log.info(
            "server_ready",
            url=self.api.url,
            version=info.get("version"),
            kv_token_capacity=self.kv_token_capacity,
            max_running_requests=info.get("max_running_requests"),
        )

    async def _keep_watch(self) -> None:
        """Report the server's end, or that it does not answer any more; a paused one answers as well."""
        missed = 0
        while True:
            await self._rest()
            if self._process is not None and not self._process.alive:
                self._lost(self._obituary(await self._process.ended()))
                return
            try:
                await self.api.model_info(_LOOK_TIMEOUT_SECONDS)
                missed = 0
            except EngineError as error:
                missed += 1
                self._log.warning("server_does_not_answer", missed=missed, message=str(error))
                if missed >= _MOST_MISSED_LOOKS:
                    self._lost(EngineLost(f"the SGLang server at {self.api.url} does not answer: {error}"))
                    return

    async def _rest(self) -> None:
        """Sleep until the next look, or until the server has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.probe_seconds):
                if self._process is not None:
                    await self._process.ended()
                else:
                    await asyncio.sleep(2 * self._options.probe_seconds)

    def _obituary(self, status: int) -> EngineLost:
        assert self._process is not None
        return EngineLost(f"the SGLang server ended with status {status}; {self._process.last_words()}")
