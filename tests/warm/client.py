"""The executable that stands in for `python`: sends its command to the server and mirrors the process that runs it."""

import array
import fcntl
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

SETTINGS = {}
HERE = os.path.dirname(os.path.abspath(__file__))
ADDRESS = os.path.join(HERE, "server.socket")
# Read when libraries are imported: a process whose variables differ from the server's needs a new interpreter.
IMPORT_VARIABLES = re.compile(
    "(DIFFUSERS|HF|HUGGINGFACE|KMP|LC|LD|MALLOC|MIMALLOC|MKL|OMP|PEFT|PYTORCH|TORCH|TRANSFORMERS|USE|XDG)_"
    "|HOME|LANG|PYTHON|TMPDIR"
)
# Of these, the ones that may differ: they are read later, are applied by the server, or cost only time. The import of
# DeepSpeed sets PYTORCH_NVML_BASED_CUDA_CHECK.
RUNTIME_VARIABLES = re.compile(
    "(DIFFUSERS|TRANSFORMERS)_VERBOSITY|HF_MODULES_CACHE|KMP_BLOCKTIME|OMP_WAIT_POLICY|PYTHON(PATH|SAFEPATH)"
    "|PYTORCH_NVML_BASED_CUDA_CHECK|TORCH_NCCL_"
)


def main() -> None:
    command = parse(sys.argv[1:])
    if command is None or not imports_alike(os.environ):
        run_cold()
    connection = connect()
    descriptors = sorted(int(name) for name in os.listdir("/proc/self/fd") if is_passed_on(int(name), connection))
    request = {
        **command,
        "executable": os.path.abspath(__file__),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "descriptors": descriptors,
        "session": os.getsid(0) == os.getpid(),
        "ignored": [int(number) for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
    }
    signals = receive_signals()
    send(connection, json.dumps(request).encode(), descriptors)
    status = wait(connection, signals)
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))


def receive_signals() -> socket.socket:
    """Return a socket with a byte per signal that arrives.

    A Python handler could run too late: a signal just before a blocking call is handled after that call.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)
    return reader


def wait(connection: socket.socket, signals: socket.socket) -> int:
    """Pass on signals until the process has ended; return its status."""
    while True:
        ready, _, _ = select.select([connection, signals], [], [])
        if connection in ready:
            answer = connection.recv(16)
            return int(answer) if answer else int(signal.SIGKILL)
        with suppress(BrokenPipeError, ConnectionResetError):  # it has just ended
            connection.send(signals.recv(16))


def parse(arguments: list) -> "dict | None":
    """Return what `python ARGUMENTS` runs, or None if it needs a new interpreter."""
    unbuffered, safe_path = False, bool(os.environ.get("PYTHONSAFEPATH"))
    while arguments and arguments[0] in ("-u", "-P"):
        unbuffered |= arguments[0] == "-u"
        safe_path |= arguments[0] == "-P"
        arguments = arguments[1:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] != "-m"):
        return None
    return {
        "module": arguments[0] == "-m",
        "arguments": arguments[1:] if arguments[0] == "-m" else arguments,
        "unbuffered": unbuffered,
        "safe_path": safe_path,
    }


def run_cold() -> None:
    if path := os.environ.pop("SD3_LIGHT_TEST_PID_FILE", None):
        with open(path, "w") as file:
            file.write(str(os.getpid()))
    os.execv(SETTINGS["python"], [SETTINGS["python"], *sys.argv[1:]])


def imports_alike(environment: "os._Environ[str]") -> bool:
    """Return whether libraries import in the same way here and in the server."""
    ours, servers = dict(environment), SETTINGS["environment"]
    names = {name for name in {*ours, *servers} if IMPORT_VARIABLES.match(name)}
    return all(ours.get(name) == servers.get(name) for name in names if not RUNTIME_VARIABLES.match(name))


def is_passed_on(descriptor: int, connection: socket.socket) -> bool:
    """Return whether a program started from here would inherit the descriptor."""
    try:
        return descriptor != connection.fileno() and os.get_inheritable(descriptor)
    except OSError:  # the descriptor of the listing itself, closed by now
        return False


def connect() -> socket.socket:
    """Connect to the server; the first client starts it."""
    with open(os.path.join(HERE, "lock"), "a") as lock:
        connection = try_connect()
        if connection is None:
            fcntl.flock(lock, fcntl.LOCK_EX)
            connection = try_connect()
        if connection is None:
            with open(os.path.join(HERE, "server.log"), "ab") as log:
                command = [SETTINGS["python"], SETTINGS["server"], ADDRESS, str(SETTINGS["owner"])]
                options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
                server = subprocess.Popen(command, env=SETTINGS["environment"], **options)
            while (connection := try_connect()) is None:
                if server.poll() is not None:
                    run_cold()
                time.sleep(0.01)
    return connection


def try_connect() -> "socket.socket | None":
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(ADDRESS)
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


def send(connection: socket.socket, request: bytes, descriptors: list) -> None:
    header = len(request).to_bytes(8, "little")
    connection.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
    connection.sendall(request)


if __name__ == "__main__":
    main()
