"""An object store through fsspec: whole objects in and out, a few at once, outages waited out.

Keys are the paths of the checkpoint folder. Nothing is renamed, appended to or locked there.
"""

from __future__ import annotations

import importlib
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from rollmesh.checkpoints.durable import make_folder, sync_file, sync_folder
from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.runtime.logging import get_logger

T = TypeVar("T")

_EXTRAS = {"s3": "s3", "gs": "gs"}
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
_FINAL = (PermissionError, IsADirectoryError, NotADirectoryError)
"""What trying again does not change."""
_PRECONDITION_FAILED = 412


class ObjectStore:
    """One prefix of a bucket. Blocking; any number of threads."""

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, *, parallel: int = 8, patience_seconds: float = 60.0
    ) -> None:
        scheme, _, path = url.partition("://")
        self.url = url.rstrip("/")
        self._prefix = path.rstrip("/")
        self._files = _file_system(scheme, dict(options or {}))
        self._parallel = parallel
        self._patience = patience_seconds

    def get(self, key: str, target: Path) -> None:
        """Copy an object to a file, which appears only when complete and flushed; FileNotFoundError if missing."""
        make_folder(target.parent)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        try:
            self._patiently(f"reading {key}", lambda: self._files.get_file(self._at(key), str(temporary)))
            sync_file(temporary)
            os.replace(temporary, target)
            sync_folder(target.parent)
        finally:
            temporary.unlink(missing_ok=True)

    def put(self, source: Path, key: str) -> None:
        """Copy a file to an object, in place of an older one."""
        self._patiently(f"writing {key}", lambda: self._files.put_file(str(source), self._at(key)), reading=False)

    def put_new(self, source: Path, key: str) -> bool:
        """``put``, unless there is such an object: that one stays, and the answer is False.

        The server decides, so one of two writers wins; one that ignores If-None-Match lets the later one win.
        """
        try:
            self._patiently(
                f"writing {key}",
                lambda: self._files.put_file(str(source), self._at(key), mode="create"),
                reading=False,
            )
        except FileExistsError:
            return False
        return True

    def get_all(self, pairs: Sequence[tuple[str, Path]]) -> None:
        """``get`` for (key, file) pairs, a bounded number at once; the first error ends it."""
        self._at_once([lambda key=key, file=file: self.get(key, file) for key, file in pairs])  # type: ignore[misc]

    def put_all(self, pairs: Sequence[tuple[Path, str]]) -> None:
        """``put`` for (file, key) pairs, a bounded number at once; the first error ends it."""
        self._at_once([lambda file=file, key=key: self.put(file, key) for file, key in pairs])  # type: ignore[misc]

    def read(self, key: str, most: int) -> bytes:
        """The first ``most`` bytes of an object; FileNotFoundError when there is no such one."""
        data: bytes = self._patiently(f"reading {key}", lambda: self._files.cat_file(self._at(key), start=0, end=most))
        return data

    def opened(self, key: str) -> BinaryIO:
        """An object as a file that reads only what is asked of it; FileNotFoundError when there is no such one."""

        def opened() -> BinaryIO:
            file: BinaryIO = self._files.open(self._at(key), "rb", cache_type="none")
            return file

        return self._patiently(f"opening {key}", opened)

    def write(self, key: str, data: bytes) -> None:
        """Write a small object."""
        self._patiently(f"writing {key}", lambda: self._files.pipe_file(self._at(key), data), reading=False)

    def sizes(self, folder: str) -> dict[str, int]:
        """Size of every object below ``folder``, by key; only writers and people list."""

        def listed() -> Mapping[str, Mapping[str, Any]]:
            self._files.invalidate_cache()
            found: Mapping[str, Mapping[str, Any]] = self._files.find(self._at(folder), detail=True)
            return found

        try:
            entries = self._patiently(f"listing {folder}", listed)
        except FileNotFoundError:
            return {}
        cut = len(self._prefix) + 1
        return {path.lstrip("/")[cut:]: int(entry["size"]) for path, entry in entries.items()}

    def delete(self, keys: Collection[str]) -> None:
        """Delete objects; those that are gone already are fine."""

        def delete(key: str) -> None:
            try:
                self._patiently(f"deleting {key}", lambda: self._files.rm_file(self._at(key)))
            except FileNotFoundError:
                return

        self._at_once([lambda key=key: delete(key) for key in keys])  # type: ignore[misc]

    def _at(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _at_once(self, calls: Sequence[Callable[[], None]]) -> None:
        with ThreadPoolExecutor(max_workers=self._parallel, thread_name_prefix="objects") as pool:
            futures = [pool.submit(call) for call in calls]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _trouble(self, what: str, error: Exception) -> CheckpointError:
        message = f"{self.url}: {what} failed: {str(error) or type(error).__name__}"
        return CheckpointError(message, reason=Reason.UNREACHABLE)

    def _patiently(self, what: str, call: Callable[[], T], *, reading: bool = True) -> T:
        deadline = time.monotonic() + self._patience
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return call()
            except FileNotFoundError as error:
                if reading:
                    raise
                raise self._trouble(what, error) from error
            except Exception as error:  # clients of object stores share no base class for an outage
                if isinstance(error, FileExistsError) or getattr(error, "code", None) == _PRECONDITION_FAILED:
                    raise FileExistsError(what) from error
                if isinstance(error, _FINAL) or time.monotonic() + pause > deadline:
                    raise self._trouble(what, error) from error
                get_logger("objects").warning("object_store_retry", what=what, message=str(error)[:200])
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _file_system(scheme: str, options: dict[str, Any]) -> Any:
    try:
        fsspec = importlib.import_module("fsspec")
        # One client per store, without its cache of listings: another process writes what this one reads.
        return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)
    except ImportError as error:
        extra = _EXTRAS.get(scheme, scheme)
        raise ConfigError(
            f"checkpoints.folder={scheme}://... needs the package {error.name or scheme}: pip install "
            f"'rollmesh[{extra}]'"
        ) from error
