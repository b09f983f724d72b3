"""Fine-tuning on this machine: in this process, or in ranks below torchrun, which a signal ends after their step."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import IO

from rollmesh.config.load import inherited_environment, write_run_config
from rollmesh.config.sft_config import SFT_FILE, SftConfig
from rollmesh.launcher.service_specs import rollmesh_command, thread_variables


@dataclass(slots=True)
class StopRequest:
    """Request of a user or a supervisor that this process stops; true once it was made."""

    on_first: Callable[[], None] = lambda: None
    """Called once, within the signal's handler."""
    _asked: bool = field(default=False, init=False)

    def __call__(self) -> bool:
        return self._asked

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take the first Ctrl-C, SIGTERM or closed terminal as a request; a second one raises KeyboardInterrupt."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._asked:
                raise KeyboardInterrupt
            self._asked = True
            self.on_first()

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_ranks(config: SftConfig, lock: IO[str]) -> tuple[int, bool]:
    """Run the ranks to their end; return torchrun's exit status, and True if a user stopped them.

    torchrun has the ``lock`` of the run folder too: if this process is killed, its ranks end after their step.

    The first signal lets them end their step and save, within the 30 seconds that torchrun gives; a second kills them.
    """
    ranks = config.launcher.trainer_processes
    threads = config.launcher.torch_threads or max(1, (os.cpu_count() or 1) // ranks)
    environment = {**inherited_environment(), **thread_variables(threads), "TOKENIZERS_PARALLELISM": "false"}
    with TemporaryDirectory() as folder:
        file = Path(folder) / SFT_FILE
        write_run_config(config, file)
        command = [*rollmesh_command(ranks), "sft", str(file), "--supervised-by", str(os.getpid())]
        # In a session of their own, so that Ctrl-C reaches only this process, which tells them once.
        process = subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=(lock.fileno(),))
        stop = StopRequest(on_first=process.terminate)
        try:
            with stop.watched():
                return process.wait(), stop()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
