"""What an operator has set, remembered by every client that looks, so that a restart of Redis does not undo it.

Redis may come back as an earlier state. Each setting carries a number that only rises. A client that has seen a newer
number than Redis knows writes that setting again; it never repeats an older one.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.store.redis_connection import Connection


class Settings:
    """The newest settings that this client has written or seen, by name; ``lib/settings.lua`` lists the names."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._newest: dict[str, tuple[int, str]] = {}

    async def write(self, name: str, value: str | int) -> None:
        """Change a setting."""
        self.note(name, await self._connection.run("write_setting", name, value), value)

    def note(self, name: str, number: bytes | int, value: str | int) -> None:
        """Remember a setting that a script of its own has written under this number; 0 when it wrote none."""
        if int(number) > self._newest.get(name, (0, ""))[0]:
            self._newest[name] = (int(number), str(value))

    async def restore(self, known: Sequence[bytes]) -> bool:
        """Compare with the settings that Redis knows (name and "number value" each); True when some were written."""
        numbers: dict[str, int] = {}
        for name, record in zip(known[::2], known[1::2], strict=True):
            number, _, value = record.decode().partition(" ")
            numbers[name.decode()] = int(number)
            self.note(name.decode(), int(number), value)
        words: list[str | int] = []
        for setting, (newest, value) in self._newest.items():
            if newest > numbers.get(setting, 0):
                words += [setting, newest, value]
        return bool(words) and bool(await self._connection.run("restore_settings", *words))
