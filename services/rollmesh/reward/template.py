"""The template process: loads the tokenizer and the verifiers once, then forks workers that share them.

``python -m rollmesh.reward.template FD`` exchanges JSON lines over the socket FD. The first line is the spec; the
reply is ``ready`` or ``failed``. The next requests are ``spawn`` (with the worker's socket attached) and ``kill``. The
template sends ``exited`` for every worker that has exited. It has no threads and no secrets of the run, and exits with
its parent.
"""

import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from rollmesh.errors import ConfigError, RollmeshError
from rollmesh.reward.confinement import (
    WorkerConfinement,
    allow_cpu,
    confine_worker,
    kill_worker,
    prepare,
    probe_worker,
    start_orphan_reaper,
    stop_orphan_reaper,
)
from rollmesh.reward.messages import LARGEST_REQUEST_BYTES, PROBE, WorkerSpec, frame, receive_frame
from rollmesh.reward.scored_answer import RewardHandler, answer_marker
from rollmesh.tasks.sandbox import kernel
from rollmesh.tasks.sandbox.command import clear_leftovers, remove_folders_of
from rollmesh.tasks.verifiers.verifier_protocol import build_verifier
from rollmesh.text import Tokenizer

_LONGEST_LINE = 1 << 20
_SPAWNS_AT_ONCE = 16


class Template:
    """Manager that forks, kills and reaps workers for the service at the other end of ``control``."""

    def __init__(
        self, control: socket.socket, spec: WorkerSpec, handler: RewardHandler, confinement: WorkerConfinement
    ) -> None:
        self._control = control
        self._spec = spec
        self._handler = handler
        self._confinement = confinement
        self._workers: dict[int, int] = {}  # pid to birth number
        self._births = 0
        self._unread = b""
        self._descriptors: list[int] = []
        self._reaper = start_orphan_reaper(confinement, control.fileno())

    def run(self) -> None:
        """Serve until the service closes the connection, then kill all workers."""
        wakeup, signalled = socket.socketpair()
        signalled.setblocking(False)
        signal.set_wakeup_fd(signalled.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        wakeup.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wakeup, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if wakeup in ready:
                    wakeup.recv(4096)
                    self._reap()
                if self._control not in ready:
                    continue
                data, descriptors, _, _ = socket.recv_fds(self._control, _LONGEST_LINE, _SPAWNS_AT_ONCE)
                if not data:
                    break
                self._descriptors += descriptors
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    if request["op"] == "spawn":
                        self._spawn(socket.socket(fileno=self._descriptors.pop(0)), int(request["slot"]))
                    elif request["pid"] in self._workers:
                        self._kill(request["pid"])
        for pid in list(self._workers):
            self._kill(pid)
        if self._reaper is not None:
            stop_orphan_reaper(self._reaper)

    def _spawn(self, connection: socket.socket, slot: int) -> None:
        # A uid is not reused soon, so that dying processes of a killed worker do not count against the next worker.
        birth = self._confinement.free_birth(self._births, self._workers.values())
        self._births = birth + 1
        pid = os.fork()
        if pid == 0:
            self._become_worker(connection, birth)
        connection.close()
        self._workers[pid] = birth
        _send(self._control, {"op": "spawned", "slot": slot, "pid": pid})

    def _become_worker(self, connection: socket.socket, birth: int) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            run_worker(connection, self._handler, self._confinement, birth, self._spec)
            status = 0
        except BrokenPipeError:
            status = 0  # the service closed the connection first
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _kill(self, pid: int) -> None:
        kill_worker(pid, self._confinement.uid(self._workers[pid]))

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            if pid in self._workers:
                # Not reaped yet, so its pid is not reused; processes that it started may still run.
                self._kill(pid)
            _, status = os.waitpid(pid, 0)
            if pid == self._reaper:
                print("the orphan reaper has exited; starting another one", file=sys.stderr)
                self._reaper = start_orphan_reaper(self._confinement, self._control.fileno())
            if self._workers.pop(pid, None) is not None:
                # A worker adopts its orphans; after its exit they become unknown children of this process.
                clear_leftovers(frozenset(filter(None, (*self._workers, self._reaper))))
                remove_folders_of(pid)
                _send(self._control, {"op": "exited", "pid": pid, "status": os.waitstatus_to_exitcode(status)})


def run_worker(
    connection: socket.socket, handler: RewardHandler, confinement: WorkerConfinement, birth: int, spec: WorkerSpec
) -> None:
    """Serve requests until the service disconnects, the handler needs a replacement, or ``items_per_worker``."""
    confine_worker(confinement, birth)
    requests = connection.makefile("rb")
    for _ in range(spec.items_per_worker):
        request = receive_frame(requests, LARGEST_REQUEST_BYTES + 1)
        if request is None:
            return
        if request[:1] == PROBE:
            connection.sendall(frame(json.dumps(probe_worker(confinement, birth)).encode()))
            continue
        allow_cpu(spec.timeout_seconds)
        connection.sendall(frame(handler(request[1:])))
        if handler.needs_replacement:
            return


def _send(control: socket.socket, message: Mapping[str, Any]) -> None:
    try:
        control.sendall(json.dumps(message).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        return  # the service has closed the connection; the next read detects it


def main(descriptor: int) -> None:
    """Load the verifiers, report the result, and fork workers on request."""
    with suppress(OSError):
        kernel.die_with_parent()
        kernel.adopt_orphans()
    control = socket.socket(fileno=descriptor)
    line = control.makefile("rb", buffering=0).readline(_LONGEST_LINE)
    spec = WorkerSpec.from_json(line.decode())
    try:
        tokenizer = Tokenizer(spec.tokenizer_folder)
        marker = answer_marker(tokenizer, spec.answer_after, spec.template_variables)
        verifiers = {spec.default_verifier: build_verifier(spec.default_verifier, spec.default_options)}
        for name in spec.required_verifiers:
            verifiers[name] = build_verifier(name, {})
        for name in spec.optional_verifiers:
            try:
                verifiers[name] = build_verifier(name, {})
            except ConfigError as error:
                print(f"verifier {name} is not available: {error}", file=sys.stderr)
    except RollmeshError as error:
        _send(control, {"op": "failed", "error": type(error).__name__, "message": str(error)})
        return
    confinement = prepare(spec.memory_limit_bytes)
    declared = {name: verifier.timeout_means_wrong for name, verifier in verifiers.items()}
    _send(control, {"op": "ready", "timeout_means_wrong": declared, "most_workers": confinement.most_workers()})
    # Loaded modules stay shared with the workers: the garbage collector never writes to their pages again.
    gc.collect()
    gc.freeze()
    handler = RewardHandler(tokenizer, verifiers, spec.default_verifier, marker)
    Template(control, spec, handler, confinement).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
