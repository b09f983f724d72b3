"""torchrun for the ranks of a trainer, with an exit status that tells whether a restart can help.

``python -m rollmesh.trainer.torchrun`` takes the flags and ``PET_*`` variables of torchrun. torchrun itself exits with
1 for every status of its ranks, so the supervisor of the ranks (a Job, ``rollmesh up``) would restart them repeatedly
with a wrong setting. After a signal it exits with 1 and a traceback.
"""

import argparse
import os
import re
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial

from torch.distributed import DistError, Store, run  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint
from torch.distributed.run import parse_min_max_nnodes

from rollmesh.runtime.lifecycle import EXIT_CONFIG, EXIT_UNFINISHED, die_with_parent


def main(arguments: Sequence[str] | None = None) -> None:
    """Run torchrun. Exits with ``EXIT_CONFIG`` or ``EXIT_UNFINISHED`` if a rank of this node exited with it.

    After a signal it exits with 128 plus the signal's number, once its ranks have ended. It ends with its ranks when
    the launcher dies that their argument ``--supervised-by`` names.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--supervised-by", type=int)
    launcher = parser.parse_known_args(arguments)[0].supervised_by
    if launcher is not None:
        die_with_parent(launcher)
    try:
        _run(run.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        # Check every rank: the others fail when the rejected rank closes its connection, and torchrun may report any
        # of them first.
        statuses = {failure.exitcode for failure in error.failures.values()}
        for status in (EXIT_CONFIG, EXIT_UNFINISHED):
            if status in statuses:
                print(error, file=sys.stderr)
                raise SystemExit(status) from error
        raise
    except SignalException as error:
        print(f"torchrun: stopped by {error.sigval.name}", file=sys.stderr)
        raise SystemExit(128 + error.sigval) from error


def _run(arguments: argparse.Namespace) -> None:
    """Run the ranks of this node, again each time that the first pod, at which the pods meet, is replaced."""
    several = use_pods(arguments)
    while True:
        if several:
            wait_for_first(arguments)
        try:
            run.run(arguments)  # type: ignore[no-untyped-call]
            return
        except (RendezvousConnectionError, DistError):
            if not several or is_first(arguments):
                raise
            say(f"the connection to pod {arguments.rdzv_endpoint}, at which all pods meet, is lost")
        except RendezvousTimeoutError:
            say(f"not all of {arguments.nnodes} pods came within {WAIT_SECONDS:.0f} s")
            raise SystemExit(1) from None


BACKEND = "pods"
WAIT_SECONDS = 600.0
"""Longest wait for a pod that is replaced, as long as torchrun's own."""
_LOOK_SECONDS = 1.0
_LOOKS_BEFORE_MISSING = 3
_REPEAT_SECONDS = 60.0
"""Time between two messages of one wait."""


class PodWatch:
    """Messages about the pods that a round of torchrun's own rendezvous waits for."""

    def __init__(self, store: Store, parameters: RendezvousParameters) -> None:
        self._store = store
        self._pods = parameters.max_nodes
        self._name = f"{socket.gethostname()} ({parameters.local_addr or socket.getfqdn()})"
        self._number = store.add("pods", 1)
        store.set(f"pods/{self._number}", self._name)
        self._round: list[str] = []
        """Names of the pods of the last round."""

    def next_round(self, join: Callable[[], RendezvousInfo]) -> RendezvousInfo:
        """Join the next round, and say meanwhile which pods are missing."""
        joined = threading.Event()
        thread = threading.Thread(target=self._watch, args=(joined,), name="missing-pods", daemon=True)
        thread.start()
        try:
            info = join()
        finally:
            joined.set()
            thread.join()
        info.store.set(f"pods/{info.rank}", self._name)
        self._round = [info.store.get(f"pods/{rank}").decode() for rank in range(info.world_size)]
        return info

    def _watch(self, joined: threading.Event) -> None:
        beats: dict[int, int] = {}
        still: dict[int, int] = {}
        said = -_REPEAT_SECONDS
        looks = 0
        while not joined.wait(_LOOK_SECONDS):
            try:
                self._store.add(f"pods/{self._number}/beat", 1)
                found = {n: self._store.add(f"pods/{n}/beat", 0) for n in range(1, self._store.add("pods", 0) + 1)}
                names = {n: self._store.get(f"pods/{n}").decode() for n in found}
            except DistError:  # the waiting thread meets the same error
                return
            still = {n: 0 if beats.get(n) != beat else still.get(n, 0) + 1 for n, beat in found.items()}
            beats, looks = found, looks + 1
            present = {names[n] for n, looks_ago in still.items() if looks_ago < _LOOKS_BEFORE_MISSING and found[n]}
            late = looks > _LOOKS_BEFORE_MISSING and time.monotonic() - said >= _REPEAT_SECONDS
            if late and len(present) < self._pods:
                said = time.monotonic()
                say(f"waiting for {self._missing(present)}, to train with {', '.join(sorted(present))}")

    def _missing(self, present: set[str]) -> str:
        """Name the pods of the last round that are not here; before the first one, those of the same workload."""
        absent = [name for name in self._round if name not in present]
        numbered = re.fullmatch(r"(.*-)\d+", socket.gethostname())
        if not absent and numbered:
            here = {name.partition(" ")[0] for name in present}
            absent = [name for at in range(self._pods) if (name := f"{numbered[1]}{at}") not in here]
        return f"pod {', '.join(absent)}" if absent else f"{self._pods - len(present)} of {self._pods} pods"


def say(text: str) -> None:
    """Print a line to the pod's log."""
    print(f"torchrun: {text}", file=sys.stderr, flush=True)


def use_pods(arguments: Namespace) -> bool:
    """Watch over the pods of a torchrun (``PodWatch``); return False for one of a single node."""
    if arguments.standalone or arguments.rdzv_backend != "c10d" or parse_min_max_nnodes(arguments.nnodes)[1] == 1:
        return False

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        backend, store = create_backend(parameters)
        handler, watch = create_handler(store, backend, parameters), PodWatch(store, parameters)
        handler.next_rendezvous = partial(watch.next_round, handler.next_rendezvous)  # type: ignore[method-assign]
        handler.get_backend = lambda: BACKEND  # type: ignore[method-assign]  # torch compares it with the registered one
        return handler

    rendezvous_handler_registry.register(BACKEND, create)
    arguments.rdzv_backend = BACKEND
    # With the shared store, torch publishes the address of rank 0 in the first round only: a pod that replaces another
    # one waits for it in vain, and all pods end after a minute.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return True


def wait_for_first(arguments: Namespace) -> None:
    """Wait until the pod answers at which all meet, unless it is this one. Raises SystemExit after ``WAIT_SECONDS``."""
    host, port = parse_rendezvous_endpoint(arguments.rdzv_endpoint, default_port=0)
    begun, said = time.monotonic(), -_REPEAT_SECONDS
    while not is_first(arguments):
        try:
            socket.create_connection((host, port), timeout=_LOOK_SECONDS).close()
            return
        except OSError as error:
            waited = time.monotonic() - begun
            if waited >= WAIT_SECONDS:
                say(f"pod {host}, at which all pods meet, has not answered for {waited:.0f} s ({error})")
                raise SystemExit(1) from None
            if time.monotonic() - said >= _REPEAT_SECONDS:
                said = time.monotonic()
                say(f"waiting for pod {host}, at which all pods meet (port {port}: {error})")
            time.sleep(_LOOK_SECONDS)


def is_first(arguments: Namespace) -> bool:
    """Tell whether this pod holds the store at which all pods meet."""
    if given := re.search(r"is_host=(\w+)", arguments.rdzv_conf):
        return given[1].lower() in ("1", "true", "t", "yes", "y")
    return _matches_machine_hostname(parse_rendezvous_endpoint(arguments.rdzv_endpoint, default_port=0)[0])


if __name__ == "__main__":
    main()
