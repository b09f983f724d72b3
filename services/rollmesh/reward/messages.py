"""Messages between the service and the processes of its pool: the spec of the template, and frames of the workers.

Workers run untrusted code, so their data is never unpickled and its lengths are checked.
"""

import asyncio
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.tasks.verifiers.verifier_protocol import BUILT_IN

_ITEMS_PER_WORKER = 20_000
SCORE = b"S"
"""First byte of a request to score the item that follows."""
PROBE = b"P"
"""Request to measure the confinement of the worker."""
LARGEST_REQUEST_BYTES = 64 << 20
LARGEST_REPLY_BYTES = 1 << 20
_HEADER = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Common parameters of worker processes."""

    tokenizer_folder: str
    default_verifier: str
    default_options: Mapping[str, Any]
    required_verifiers: tuple[str, ...]
    """Verifiers required in addition to the default; the service does not start without them."""
    optional_verifiers: tuple[str, ...]
    """Verifiers that rows of the data set may name; loaded if their packages are installed."""
    answer_after: str | None
    template_variables: Mapping[str, Any]
    """Variables of the chat template, which may open a thought."""
    timeout_seconds: float
    memory_limit_bytes: int
    items_per_worker: int = _ITEMS_PER_WORKER
    """Number of answers after which a worker is replaced, to limit memory leaks and caches of libraries."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "WorkerSpec":
        return TypeAdapter(WorkerSpec).validate_json(text)


def worker_spec(config: RunConfig) -> WorkerSpec:
    """Build the spec of a run; raises ConfigError if the model folder is missing."""
    default = config.reward.verifier
    required: set[str] = set()
    optional: set[str] = set()
    for source in config.data.sources.values():
        if source.task_verifier:
            required.add(source.task_verifier)
        elif source.rows_name_verifiers:
            optional |= {name for name, row in BUILT_IN.items() if not row.needs_options}
    return WorkerSpec(
        tokenizer_folder=str(resolve_model(config.model.path)),
        default_verifier=default,
        default_options=config.reward.options,
        required_verifiers=tuple(sorted(required - {default})),
        optional_verifiers=tuple(sorted(optional - required - {default})),
        answer_after=config.reward.answer_after,
        template_variables=config.data.chat_template_kwargs,
        timeout_seconds=config.reward.timeout_seconds,
        memory_limit_bytes=config.reward.memory_limit_bytes,
    )


class FrameError(Exception):
    """Invalid frame, or end of the stream inside a frame."""


def frame(payload: bytes) -> bytes:
    """Encode one frame."""
    return _HEADER.pack(len(payload)) + payload


async def read_frame(stream: asyncio.StreamReader, largest_bytes: int) -> bytes:
    """Wait for a whole frame. Raises EOFError if the peer closes the connection before, FrameError for a large one."""
    (size,) = _HEADER.unpack(await stream.readexactly(_HEADER.size))
    if size > largest_bytes:
        raise FrameError(f"frame of {size} bytes, the limit is {largest_bytes}")
    return await stream.readexactly(size)


def receive_frame(stream: BinaryIO, largest_bytes: int) -> bytes | None:
    """Block until a whole frame has arrived; return None if the peer has closed the connection between frames."""
    header = stream.read(_HEADER.size)
    if not header:
        return None
    size = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else 0
    if size > largest_bytes:
        raise FrameError(f"frame of {size} bytes, the limit is {largest_bytes}")
    payload = stream.read(size)
    if len(header) < _HEADER.size or len(payload) < size:
        raise FrameError("the stream ended inside a frame")
    return payload
