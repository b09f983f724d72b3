"""The pip of this machine inside a build: its indexes and authorities as build secrets, never in an image.

Local folders that pip looks into (find-links, file: indexes) are served on the loopback for as long as images are
built; builds use the machine's network.
"""

import contextlib
import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

_SINGLE = ("index-url", "cert")
_LISTS = ("extra-index-url", "find-links", "trusted-host")


def pip_options() -> dict[str, list[str]]:
    """Options that pip has here from its files and its environment, by name, lists in order."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        name, words = key.rpartition(".")[2], value.strip().strip("'\"").replace("\\n", " ").split()
        if name in _SINGLE:
            found.setdefault(name, words)  # pip lists the environment first, which wins over its files
        elif name in _LISTS:
            found.setdefault(name, []).extend(w for w in words if w not in found.get(name, []))
    return found


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """A folder under an address on the loopback, with its siblings: an index may link to files beside itself."""
    handler = functools.partial(_Quiet, directory=str(folder.parent))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/{folder.name}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def pip_secrets(folder: Path) -> Iterator[list[str]]:
    """Arguments of ``docker build`` that give it this machine's pip configuration."""
    options = pip_options()
    with contextlib.ExitStack() as stack:
        lines, arguments = ["[global]", "disable-pip-version-check = true", "timeout = 180"], []
        for name in ("index-url", *_LISTS):
            values = [stack.enter_context(served(local)) if (local := _local(v)) else v for v in options.get(name, [])]
            hosts = ["127.0.0.1"] if name == "trusted-host" else []
            if values or hosts:
                lines.append(f"{name} = " + "\n    ".join([*values, *hosts]))
        if options.get("cert"):
            lines.append("cert = /run/secrets/pip-ca")
            arguments += ["--secret", f"id=pip-ca,src={options['cert'][0]}"]
        conf = folder / "pip.conf"
        conf.write_text("\n".join(lines) + "\n")
        yield [*arguments, "--secret", f"id=pip-conf,src={conf}"]


def _local(value: str) -> Path | None:
    path = Path(urlsplit(value).path if value.startswith("file:") else value)
    return path if path.is_absolute() and path.is_dir() else None
