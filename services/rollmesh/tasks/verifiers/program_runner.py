"""Runner inside the sandbox: runs an answer as a program, once for each input, with the standard library only.

Standard input has the length of a tuple in the format of ``marshal``, the tuple, and the inputs one after the other.
The tuple: code, prelude, the length of each input, most bytes of output, most bytes of a file, and the filter of system
calls for programs. Each program is a fork: a sandbox and an interpreter for each input would take most of the time of
the tests, and every module that is imported here makes a fork slower. One line per finished program has the number of
its input and, as JSON, the hexadecimal of its standard output, or its exit status if that is not 0.

No program sees what another one has read, written or left: a process of its own feeds and watches each of them, and
nothing of it is left when the next one begins. No expected output is sent to this process.
"""

import ctypes
import marshal
import os
import resource
import site
import struct
import sys
from types import CodeType

SCRIPT = "answer.py"
_KILL = 9
_SET_DUMPABLE = 4
_SET_SECCOMP = 22
_FILTER_MODE = 2


def main() -> tuple[bytes, str] | None:
    """Run one job; return code and prelude in the process of each program, and None in the others."""
    stream, report = os.dup(0), os.dup(1)
    header = read_all(stream, int.from_bytes(read_all(stream, 4), "big"))
    code, prelude, lengths, output_bytes, file_bytes, call_filter = marshal.loads(header)
    libc = ctypes.CDLL(None)
    # Programs have the same uid: without this they could open the pipes and the memory of this process and its forks.
    libc.prctl(_SET_DUMPABLE, ctypes.c_ulong(0))
    for number, length in enumerate(lengths):
        watcher = os.fork()
        if watcher:
            end_all(watcher)
            continue
        text = read_all(stream, length)
        os.chmod(".", 0o700)
        empty(".")
        with open(SCRIPT, "wb") as script:
            script.write(code)
        stdin = input_file(text)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            libc.prctl(_SET_DUMPABLE, ctypes.c_ulong(1))
            os.dup2(stdin, 0)
            os.dup2(writer, 1)
            os.closerange(3, 256)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
            filter_system_calls(libc, call_filter)
            return code, prelude
        os.close(writer)
        write_all(report, f"{number} {outcome(child, reader, output_bytes)}\n".encode())
        os._exit(0)  # the end of an interpreter would take as long as a short program
    return None


def end_all(watcher: int) -> None:
    """Wait for the watcher of a program, and end and reap all processes that the program has left."""
    os.waitid(os.P_PID, watcher, os.WEXITED | os.WNOWAIT)
    if os.getpid() == 1:  # of a namespace; without one, the only program of a sandbox is followed by its end
        os.kill(-1, _KILL)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def empty(folder: str) -> None:
    """Remove all that a folder contains, also below folders that a program has closed."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o700)
            empty(entry.path)
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)


def read_all(descriptor: int, length: int) -> bytes:
    """Read a text of this length."""
    parts = []
    while length and (part := os.read(descriptor, length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def input_file(text: bytes) -> int:
    """Return the descriptor of a file without a name that has this text."""
    stdin = os.open("stdin", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.unlink("stdin")
    write_all(stdin, text)
    os.lseek(stdin, 0, os.SEEK_SET)
    return stdin


def write_all(descriptor: int, text: bytes) -> None:
    """Write the whole text."""
    while text:
        text = text[os.write(descriptor, text) :]


def outcome(child: int, reader: int, most_bytes: int) -> str:
    """Read the output of a program until its end or the limit, and wait for its end; return JSON."""
    output = bytearray()
    while len(output) <= most_bytes and (data := os.read(reader, 65536)):
        output += data
    if len(output) > most_bytes:
        os.kill(child, _KILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return f'{{"error": {status}}}' if status else f'{{"value": {{"bytes": "{output.hex()}"}}}}'


def filter_system_calls(libc: ctypes.CDLL, program: bytes) -> None:
    """Apply a filter; none on a machine without filters, as in ``tasks.sandbox``."""
    if program:
        instructions = ctypes.create_string_buffer(program, len(program))
        packed = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
        described = ctypes.create_string_buffer(packed, len(packed))
        unused = ctypes.c_ulong(0)
        libc.prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER_MODE), ctypes.byref(described), unused, unused)


def become_program(code: bytes, prelude: str) -> CodeType:
    """Leave in this module what an interpreter sets at its start, and run the prelude; return the program."""
    path = os.path.abspath(SCRIPT)
    sys.argv[:] = [SCRIPT]
    sys.path.insert(0, os.getcwd())
    site.setquit()
    site.setcopyright()
    site.sethelper()
    namespace = globals()
    for name in [name for name in namespace if not name.startswith("__")]:
        del namespace[name]
    namespace.update(__doc__=None, __file__=path)
    exec(compile(prelude, "prelude", "exec"), namespace)
    return compile(code, path, "exec")


if __name__ == "__main__":
    # At the top level: errors, exits, threads and atexit of the program are those of an interpreter.
    if (program := main()) is not None:
        exec(become_program(*program))
