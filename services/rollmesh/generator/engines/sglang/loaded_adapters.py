"""Adapters in the server: a name for each load, the slices that name it, and unloading of those without any."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rollmesh.errors import EngineError
from rollmesh.generator.engines.policy_folders import AdaptedLayers, AdapterSettings, adapted_layers
from rollmesh.generator.engines.sglang.server_api import SglangApi
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import BackgroundTasks

_NAME = re.compile(r"policy-v(\d+)(?:-(\d+))?")
"""Name of a load: its version, and its number from the second load of the version on."""
_UNKNOWN = "does not exist"
"""Part of the server's error for a name that it does not have: an earlier request has unloaded it after all."""


class LoadedAdapters:
    """Adapters of one engine by version; a name is never used twice.

    The server caches prompts under a key with the name. If a name were used again, a slice could continue a prompt that
    was cached under the weights of an earlier load.
    """

    def __init__(self, settings: AdapterSettings, api: Callable[[], SglangApi], seconds: float) -> None:
        self.settings = settings
        self.layers = AdaptedLayers(config=settings.config, layers={})
        """Adapted layers of the base; none before ``start_above``."""
        self.base_version = -1
        self._api = api
        self._seconds = seconds
        """Time limit of a load."""
        self._names: dict[int, str] = {}
        self._loads: Counter[int] = Counter()
        self._uses: Counter[int] = Counter()
        self._served: set[int] = set()
        """Versions that have been in service, their canary having passed."""
        self._surplus: set[int] = set()
        self._not_unloaded: set[str] = set()
        """Names whose unload has failed."""
        self._unloads = BackgroundTasks()
        self._log = get_logger("sglang")

    def start_above(self, tensors: Mapping[str, tuple[int, ...]], version: int) -> None:
        """Set the base; ConfigError if it lacks a layer of ``model.adapter.target``."""
        self.layers, self.base_version = adapted_layers(tensors, self.settings.config), version

    def has(self, version: int) -> bool:
        return version == self.base_version or version in self._names

    def name(self, version: int) -> str | None:
        """Return the server's name of a version; None for the base."""
        return None if version == self.base_version else self._names[version]

    async def load(self, folder: Path, version: int) -> None:
        """Load an adapter beside the others; EngineError if the server rejects it.

        A version that has served is not loaded again while the server has it, and its pending unload is cancelled. One
        that failed its canary is loaded again.
        """
        if version in self._names and version in self._served:
            self._surplus.discard(version)
            return
        self._loads[version] += 1
        count = self._loads[version]
        name = f"policy-v{version}" if count == 1 else f"policy-v{version}-{count}"
        message = await self._api().load_adapter(name, str(folder), self._seconds)
        if message:
            raise EngineError(f"the SGLang server rejects policy version {version}: {message}")
        if version in self._names:
            self._unloads.start(self._unload(self._names[version]))
        self._names[version] = name

    def retain(self, in_service: int) -> None:
        """Keep the newest versions and the one in service; unload the others once no slice names them.

        Unloads that have failed are tried again.
        """
        self._served.add(in_service)
        kept = {in_service, *sorted(self._names)[-self.settings.kept_versions :]}
        self._surplus = set(self._names) - kept
        self._unload_surplus()
        failed, self._not_unloaded = self._not_unloaded, set()
        for name in sorted(failed):
            self._unloads.start(self._unload(name))

    @contextmanager
    def named(self, version: int) -> Iterator[str | None]:
        """Keep a version loaded for the duration of the block, while a slice or a score names it; yields its name."""
        name = self.name(version)
        self._uses[version] += 1
        try:
            yield name
        finally:
            self._uses[version] -= 1
            self._unload_surplus()

    async def unload_leftovers(self) -> None:
        """Unload the adapters that an earlier process left in the server; loads get names after theirs."""
        for name in await self._api().model_names():
            if found := _NAME.fullmatch(name):
                version, count = int(found[1]), int(found[2] or 1)
                self._loads[version] = max(self._loads[version], count)
                await self._unload(name)

    async def aclose(self) -> None:
        await self._unloads.cancel()

    def _unload_surplus(self) -> None:
        # The server waits for the requests that name an adapter, and takes no other load until then.
        for version in [v for v in self._surplus if not self._uses[v]]:
            self._surplus.discard(version)
            self._unloads.start(self._unload(self._names.pop(version)))

    async def _unload(self, name: str) -> None:
        try:
            message = await self._api().unload_adapter(name, self._seconds)
        except EngineError as error:
            message = str(error)
        if message and _UNKNOWN not in message:
            self._not_unloaded.add(name)
            self._log.warning("adapter_not_unloaded", name=name, message=message)
