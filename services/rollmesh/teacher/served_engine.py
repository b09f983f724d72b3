"""The SGLang engine of a teacher: a server that this process starts on the frozen folder, or one at a url."""

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from rollmesh.config import RunConfig
from rollmesh.config.generator import GeneratorConfig
from rollmesh.config.teachers import TeacherConfig, teacher_service
from rollmesh.errors import ConfigError, DataError, EngineError, GenerationRefused
from rollmesh.generator.engines.sglang.server import SglangServer
from rollmesh.generator.engines.sglang.sglang_options import SglangOptions
from rollmesh.generator.engines.sglang.slices import read_scores, read_top_scores, score_body
from rollmesh.teacher.teacher_engine import ScoreRequest, TokenScores, fail

_SLOTS = 16
"""Sequences in the server at once; it needs no more than fill a pass."""


def server_options(config: RunConfig, name: str, index: int) -> SglangOptions:
    """Return the options of the server of a teacher."""
    teacher: TeacherConfig = config.teachers[name]
    key = teacher.sglang.admin_key
    own_key = secrets.token_hex(16) if teacher.sglang.url is None else None
    return SglangOptions(
        generator=GeneratorConfig(
            engine="sglang",
            device=teacher.device,
            slots=_SLOTS,
            max_context_tokens=config.generator.max_context_tokens,
            sglang=teacher.sglang,
        ),
        dtype=teacher.dtype,
        frozen=True,
        admin_key=own_key if key is None else key.get_secret_value(),
        log_file=Path(config.folder) / "logs" / f"sglang-{teacher_service(name)}-{index}.log",
    )


class ServedEngine:
    """Engine on one SGLang server, whose cache keeps what the members of a group begin with."""

    def __init__(self, options: SglangOptions, name: str) -> None:
        self._options = options
        self._name = name
        self._slots = asyncio.Semaphore(_SLOTS)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server = SglangServer(options, lambda error: fail(self.failed, self._named(error)))

    @asynccontextmanager
    async def running(self, folder: Path) -> AsyncIterator[None]:
        """Run or use the server within the block. Raises ConfigError for another model, EngineError if it is lost."""
        try:
            await self._server.start(folder, 0)
            yield
        except ConfigError as error:
            raise ConfigError(self._text(error)) from error
        except EngineError as error:
            raise self._named(error) from error
        finally:
            await self._server.aclose()

    async def score(self, request: ScoreRequest) -> TokenScores:
        """Score a sequence by one request of its own."""
        if self.failed.done():
            self.failed.result()
        ids, start = request.token_ids, request.prompt_token_count - 1
        body = score_body(ids.tolist(), request_id=uuid.uuid4().hex, start=start, top_k=request.top_k, frozen=True)
        limit = self._options.server.request_timeout_seconds
        try:
            async with self._slots, asyncio.timeout(limit):
                answer = await self._server.api.generate(body)
        except TimeoutError as error:
            raise EngineError(
                f"no answer within teachers.{self._name}.sglang.request_timeout_seconds={limit:g}"
            ) from error
        except GenerationRefused as error:
            raise EngineError(str(error)) from error
        except EngineError as error:
            raise self._named(await self._server.explain(error)) from error
        try:
            logprobs = read_scores(answer, len(ids) - start)
            none = np.empty((len(logprobs), 0), np.int32)
            top_ids, top_logprobs = read_top_scores(answer) if request.top_k else (none, none.astype(np.float32))
        except EngineError as error:
            raise DataError(str(error)) from error
        return TokenScores(logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)

    def _named(self, error: EngineError) -> EngineError:
        return EngineError(self._text(error))

    def _text(self, error: Exception) -> str:
        """Return the message of an error with the fields of this teacher instead of a generator's."""
        return str(error).replace("generator.sglang.", f"teachers.{self._name}.sglang.")
