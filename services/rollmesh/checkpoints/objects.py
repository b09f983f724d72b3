"""Object store access through fsspec: transfers of complete objects, bounded concurrency, retries during outages.

Keys are the paths of the checkpoint folder. Objects are never renamed, appended to or locked.
"""

import hashlib
import importlib
import io
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from rollmesh.checkpoints.durable import make_folder, naming_full_disk, sync_file, sync_folder
from rollmesh.errors import CheckpointError, ConfigError, Reason
from rollmesh.runtime.health import Waits
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import Backoff

T = TypeVar("T")

_EXTRAS = {"s3": "s3", "gs": "gs"}
_BACKOFF = Backoff(first_seconds=0.2, longest_seconds=5.0)
_PERMANENT = (PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that are not retried."""
_PRECONDITION_FAILED = 412
_WAIT = "object store"
_SLOW_SECONDS = 2.0
"""Time after which a missing answer shows among the waits of the process."""
_S3_OPTIONS: Mapping[str, Any] = {"connect_timeout": 3.0, "retries": {"total_max_attempts": 2}}
"""Options of the client of S3: it repeats a call once, so that the first error shows within seconds."""
_RANGE_BYTES = 16 << 20


class ObjectStore:
    """One prefix of a bucket. Calls block; thread-safe."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        parallel: int = 8,
        retry_seconds: float = 60.0,
        waits: Waits | None = None,
    ) -> None:
        """Open a prefix; ``waits`` shows the last error of each operation that is retried."""
        scheme, _, path = url.partition("://")
        self.url = url.rstrip("/")
        self._prefix = path.rstrip("/")
        self._files = _file_system(scheme, dict(options or {}))
        self._parallel = parallel
        self._retry_seconds = retry_seconds
        self._waits = waits or Waits()

    def get(self, key: str, target: Path) -> None:
        """Copy an object to a file, which appears only when complete and flushed. FileNotFoundError if missing.

        Raises CheckpointError (disk_full) at once if the disk of the file is full.
        """
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")

        def copy() -> None:
            with naming_full_disk(target.parent, f"a copy of {key}"):
                self._files.get_file(self._full_key(key), str(temporary))

        try:
            with naming_full_disk(target.parent, f"a copy of {key}"):
                make_folder(target.parent)
                self._retry(f"reading {key}", copy, large=True)
                sync_file(temporary)
                os.replace(temporary, target)
                sync_folder(target.parent)
        finally:
            temporary.unlink(missing_ok=True)

    def put(self, source: Path, key: str) -> None:
        """Copy a file to an object, replacing an existing one."""
        put = partial(self._files.put_file, str(source), self._full_key(key))
        self._retry(f"writing {key}", put, reading=False, large=True)

    def put_new(self, source: Path, key: str) -> bool:
        """Copy a file to a new object; return False and change nothing if the object exists.

        The server decides, so one of two writers wins. On a server that ignores If-None-Match the later writer wins.
        """
        put = partial(self._files.put_file, str(source), self._full_key(key), mode="create")
        try:
            self._retry(f"writing {key}", put, reading=False, large=True)
        except FileExistsError:
            return False
        return True

    def get_all(self, pairs: Sequence[tuple[str, Path]]) -> None:
        """Run ``get`` for (key, file) pairs."""
        self._run_all(self.get, pairs)

    def put_all(self, pairs: Sequence[tuple[Path, str]]) -> None:
        """Run ``put`` for (file, key) pairs."""
        self._run_all(self.put, pairs)

    def read(self, key: str, max_bytes: int, start: int = 0) -> bytes:
        """Read up to ``max_bytes`` bytes of an object from ``start`` on. Raises FileNotFoundError if it is missing."""
        read: Callable[[], bytes] = partial(
            self._files.cat_file, self._full_key(key), start=start, end=start + max_bytes
        )
        return self._retry(f"reading {key}", read)

    def sha256_all(self, ranges: Sequence[tuple[str, int, int]]) -> list[str | None]:
        """Return the sha256 (hex) of bytes ``start`` to ``end`` of each (key, start, end), with bounded concurrency.

        The digest of an object that is missing, shorter, or longer than a range from its first byte is None.
        """
        return self._run_all(self._sha256, ranges)

    def _sha256(self, key: str, start: int, end: int) -> str | None:
        digest = hashlib.sha256()
        try:
            with self.open(key) as file:
                size = file.seek(0, io.SEEK_END)
            if size < end or (start == 0 and size > end):
                return None
            for at in range(start, end, _RANGE_BYTES):
                digest.update(self.read(key, min(_RANGE_BYTES, end - at), at))
        except FileNotFoundError:
            return None
        return digest.hexdigest()

    def open(self, key: str) -> BinaryIO:
        """Open an object as a file that reads only the requested bytes. FileNotFoundError if it does not exist."""
        open_file: Callable[[], BinaryIO] = partial(self._files.open, self._full_key(key), "rb", cache_type="none")
        return self._retry(f"opening {key}", open_file)

    def write(self, key: str, data: bytes) -> None:
        """Write a small object."""
        self._retry(f"writing {key}", lambda: self._files.pipe_file(self._full_key(key), data), reading=False)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size of every object below ``folder``, by key. Readers of policies never list."""

        def find() -> Mapping[str, Mapping[str, Any]]:
            self._files.invalidate_cache()
            found: Mapping[str, Mapping[str, Any]] = self._files.find(self._full_key(folder), detail=True)
            return found

        try:
            entries = self._retry(f"listing {folder}", find)
        except FileNotFoundError:
            return {}
        cut = len(self._prefix.lstrip("/")) + 1
        return {path.lstrip("/")[cut:]: int(entry["size"]) for path, entry in entries.items()}

    def delete(self, keys: Collection[str]) -> None:
        """Delete objects; missing objects are ignored."""

        def delete(key: str) -> None:
            with suppress(FileNotFoundError):
                self._retry(f"deleting {key}", partial(self._files.rm_file, self._full_key(key)))

        self._run_all(delete, [(key,) for key in keys])

    def _full_key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _run_all(self, call: Callable[..., T], arguments: Sequence[tuple[Any, ...]]) -> list[T]:
        """Run calls with bounded concurrency; the first error cancels the rest."""
        with ThreadPoolExecutor(max_workers=self._parallel, thread_name_prefix="objects") as pool:
            futures = [pool.submit(call, *each) for each in arguments]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _retry(self, operation: str, call: Callable[[], T], *, reading: bool = True, large: bool = False) -> T:
        """Return the result of ``call``, retried during an outage, which shows meanwhile; so does a late answer.

        A ``large`` transfer may take its time.
        """
        if not large:
            self._waits.begin(_WAIT, f"{self.url}: {operation}: no answer yet", after_seconds=_SLOW_SECONDS)
        try:
            return self._retried(operation, call, reading=reading)
        finally:
            self._waits.end(_WAIT)

    def _retried(self, operation: str, call: Callable[[], T], *, reading: bool) -> T:
        where, deadline = f"{self.url}: {operation} failed", time.monotonic() + self._retry_seconds
        failure_count = 0
        while True:
            try:
                return call()
            except FileNotFoundError as error:
                if reading and not refusal(error):
                    raise
                raise store_error(where, error, writing=not reading) from error
            except CheckpointError:  # a full disk of this node
                raise
            except Exception as error:  # clients of object stores have no common base class for an outage
                if isinstance(error, FileExistsError) or getattr(error, "code", None) == _PRECONDITION_FAILED:
                    raise FileExistsError(operation) from error
                failure = store_error(where, error)
                failure_count += 1
                pause = _BACKOFF.seconds(failure_count)
                if failure.final or isinstance(error, _PERMANENT) or time.monotonic() + pause > deadline:
                    raise failure from error
                get_logger("objects").warning("object_store_retry", what=operation, message=str(error)[:200])
                self._waits.begin(_WAIT, str(failure))
            time.sleep(pause)


def _file_system(scheme: str, options: dict[str, Any]) -> Any:
    try:
        fsspec = importlib.import_module("fsspec")
        if scheme == "s3":
            options["config_kwargs"] = {**_S3_OPTIONS, **options.get("config_kwargs", {})}
        # One client per store, without a cache of listings: another process writes the objects that this one reads.
        return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)
    except ImportError as error:
        extra = _EXTRAS.get(scheme, scheme)
        raise ConfigError(
            f"checkpoints.folder={scheme}://... requires the package {error.name or scheme}: pip install "
            f"'rollmesh[{extra}]'"
        ) from error


_PASSING = frozenset(
    {
        "BadDigest",
        "ExpiredToken",
        "IncompleteBody",
        "QuotaExceeded",
        "RequestTimeout",
        "RequestTimeTooSkewed",
        "TokenRefreshRequired",
        "XMinioAdminBucketQuotaExceeded",
    }
)
"""Codes of refusals that a later attempt may not meet; a full quota is one, like a full disk."""
_MANUAL = "see docs/object-stores.md"
_CHECKSUMS = (
    "if the server does not know the checksums of newer clients, set AWS_REQUEST_CHECKSUM_CALCULATION=when_required "
    f"and AWS_RESPONSE_CHECKSUM_VALIDATION=when_required in the environment of all services ({_MANUAL})"
)
_REMEDIES = {
    301: "the bucket is in another region or at another endpoint: set AWS_DEFAULT_REGION, or endpoint_url in "
    "checkpoints.object_store",
    400: f"check the bucket's name and checkpoints.object_store; {_CHECKSUMS}",
    401: "check the credentials in the environment of all services",
    403: "check the credentials in the environment of all services, and allow them to list the bucket and to read, "
    f"write and delete its objects ({_MANUAL})",
    404: "create the bucket, or correct checkpoints.folder",
    405: f"endpoint_url in checkpoints.object_store is no object store, or one without this operation ({_MANUAL})",
    411: _CHECKSUMS,
    501: f"the server lacks a function: conditional writes (If-None-Match) are required ({_MANUAL}); {_CHECKSUMS}",
}
_REMEDY_WITHOUT_CREDENTIALS = f"set the credentials in the environment of all services ({_MANUAL})"
_REMEDY_OF_ENDPOINT = "correct endpoint_url in checkpoints.object_store, for example https://minio.example.org:9000"
_TLS_REFUSALS = {
    "CERTIFICATE_VERIFY_FAILED": "set AWS_CA_BUNDLE to the authority that signed the certificate in the environment "
    f"of all services ({_MANUAL}), and use a host name of the certificate in checkpoints.object_store",
    "WRONG_VERSION_NUMBER": "the server of endpoint_url in checkpoints.object_store does not speak TLS: use http://",
}
"""Remedies by the code of OpenSSL, which is in the text of the error of any client."""
_LOCAL_REFUSALS = {
    "NoCredentialsError": _REMEDY_WITHOUT_CREDENTIALS,
    "PartialCredentialsError": _REMEDY_WITHOUT_CREDENTIALS,
    "ProfileNotFound": _REMEDY_WITHOUT_CREDENTIALS,
    "DefaultCredentialsError": _REMEDY_WITHOUT_CREDENTIALS,
    "NoRegionError": _REMEDIES[301],
    "InvalidRegionError": _REMEDIES[301],
    "UnknownEndpointError": _REMEDY_OF_ENDPOINT,
    "EndpointProviderError": _REMEDY_OF_ENDPOINT,
    "ParamValidationError": "correct checkpoints.folder and checkpoints.object_store",
}
"""Remedies by the class of an error that a client raises before it sends a request."""


def store_error(where: str, error: BaseException, *, writing: bool = False) -> CheckpointError:
    """Convert an error of a client of an object store; ``where`` names the store and the operation.

    The reason is ``refused``, which is final, or ``unreachable``.
    """
    message = f"{where}: {str(error) or type(error).__name__}"
    remedy = refusal(error, writing=writing)
    if remedy:
        return CheckpointError(f"{message}; {remedy}", reason=Reason.REFUSED)
    return CheckpointError(message, reason=Reason.UNREACHABLE)


def refusal(error: BaseException, *, writing: bool = False) -> str:
    """Return the remedy of a refusal that no retry changes; empty for an outage, and for an object that is missing."""
    each: BaseException | None = error
    while each is not None:
        code, status = _answer(each)
        if code in _PASSING:
            return ""
        if code == "NoSuchBucket" or (status == 404 and writing):
            return _REMEDIES[404]
        if status in _REMEDIES and status != 404:
            return _REMEDIES[status]
        if type(each).__name__ in _LOCAL_REFUSALS:
            return _LOCAL_REFUSALS[type(each).__name__]
        tls = next((remedy for code, remedy in _TLS_REFUSALS.items() if code in str(each)), "")
        if tls and "has expired" not in str(each):  # such a certificate is renewed
            return tls
        if isinstance(each, ValueError) and "endpoint" in str(each).lower():
            return _REMEDY_OF_ENDPOINT
        each = each.__cause__
    return ""


def _answer(error: BaseException) -> tuple[str, int]:
    """Return code and HTTP status of the answer that a client of S3 (botocore) or Google (gcsfs) has converted."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        code = str(response.get("Error", {}).get("Code", ""))
        return code, int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    status = getattr(error, "code", None)
    return "", status if isinstance(status, int) else 0
