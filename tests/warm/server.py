"""The server behind the stand-in for `python`: forks processes that have torch, diffusers and transformers imported."""

import array
import atexit
import fcntl
import gc
import io
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_DESCRIPTORS = 250


@dataclass
class Child:
    """A running child and the connection to its client."""

    pid: int
    exit: int
    connection: socket.socket
    is_leader: bool


def import_libraries() -> None:
    """Import what takes long; nothing of this package, and nothing that starts a thread."""
    import accelerate  # noqa: F401
    import numpy as np  # noqa: F401
    import peft  # noqa: F401
    import PIL.ImageFont  # noqa: F401
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401
    import rich.progress
    import rich.table  # noqa: F401
    import tomli_w  # noqa: F401
    import typer  # noqa: F401
    from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline  # noqa: F401
    from diffusers.utils import dynamic_modules_utils  # noqa: F401
    from pydantic import BaseModel  # noqa: F401
    from transformers import CLIPTextModelWithProjection, T5EncoderModel  # noqa: F401


def serve(address: str, owner: int) -> "dict[str, Any] | None":
    """Fork a child per request. Return the request in a child, and None in the server after its owner ended."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    owner_exit = os.pidfd_open(owner)
    selector.register(owner_exit, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    children = dict[int, Child]()
    while True:
        for key, _ in selector.select():
            if key.fileobj == owner_exit:
                for child in children.values():
                    kill(child)
                os.unlink(address)
                return None
            if key.fileobj is listener:
                connection, _ = listener.accept()
                try:
                    request, descriptors = receive(connection)
                except (EOFError, ConnectionResetError):  # its client was killed
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    ours = [listener.detach(), connection.detach(), owner_exit]
                    ours += [
                        number for child in children.values() for number in (child.exit, child.connection.detach())
                    ]
                    close(ours)
                    take_over(request, descriptors)
                    return request
                close(descriptors)
                child = Child(pid, os.pidfd_open(pid), connection, request["session"])
                children[pid] = child
                selector.register(child.exit, selectors.EVENT_READ, child)
                selector.register(connection, selectors.EVENT_READ, child)
                continue
            child = key.data
            if child.pid not in children:
                continue
            if key.fileobj is child.connection:
                numbers = receive_signals(child.connection)
                for number in numbers:
                    os.kill(child.pid, number)
                if numbers:
                    continue
                kill(child)  # its client was killed
            _, status = os.waitpid(child.pid, 0)
            selector.unregister(child.exit)
            selector.unregister(child.connection)
            with suppress(OSError):  # its client was killed
                child.connection.sendall(str(status).encode())
            child.connection.close()
            os.close(child.exit)
            del children[child.pid]


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request and its open files; raise EOFError if the client ends before its request is complete."""
    numbers = array.array("i")
    header, extra, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(MAX_DESCRIPTORS * numbers.itemsize))
    for level, kind, data in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    missing, parts = int.from_bytes(header, "little"), []
    while missing:
        parts.append(connection.recv(missing))
        missing -= len(parts[-1])
        if not parts[-1]:
            break
    if missing or not parts:
        close(list(numbers))
        raise EOFError
    return json.loads(b"".join(parts)), list(numbers)


def receive_signals(connection: socket.socket) -> bytes:
    try:
        return connection.recv(16)
    except ConnectionResetError:
        return b""


def kill(child: Child) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL) if child.is_leader else os.kill(child.pid, signal.SIGKILL)
    except ProcessLookupError:  # it had ended, or its session has not started yet
        os.kill(child.pid, signal.SIGKILL)


def close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def take_over(request: dict[str, Any], descriptors: list[int]) -> None:
    """Make this process look like the client: session, folder, environment, open files, signal handlers."""
    if request["session"]:
        os.setsid()
    if "SD3_LIGHT_TEST_PID_FILE" in request["environment"]:
        write_pid(request["environment"].pop("SD3_LIGHT_TEST_PID_FILE"))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    above = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, MAX_DESCRIPTORS) for number in descriptors]
    close(descriptors)
    for source, target in zip(above, request["descriptors"], strict=True):
        os.dup2(source, target)
    close(above)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    through = request["unbuffered"]
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = open(number, "wb", closefd=False)  # noqa: SIM115
        errors = "backslashreplace" if name == "stderr" else "strict"
        lines = name == "stderr" or os.isatty(number)
        stream = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=lines, write_through=through)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    apply_variables(request["environment"])
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    random.seed()
    sys.modules["numpy"].random.seed()


def write_pid(path: str) -> None:
    temporary = Path(f"{path}.tmp")
    temporary.write_text(str(os.getpid()), encoding="ascii")
    temporary.rename(path)


def apply_variables(environment: dict[str, str]) -> None:
    """Apply the variables that libraries read at import and that the client passes on nevertheless."""
    from diffusers.utils import dynamic_modules_utils

    dynamic_modules_utils.HF_MODULES_CACHE = environment.get("HF_MODULES_CACHE", dynamic_modules_utils.HF_MODULES_CACHE)
    for library in ("diffusers", "transformers"):
        if level := environment.get(f"{library.upper()}_VERBOSITY"):
            logging = sys.modules[f"{library}.utils.logging"]
            logging.set_verbosity(logging.log_levels[level])


def run(request: dict[str, Any]) -> None:
    """Run the command as the interpreter would."""
    target, *arguments = request["arguments"]
    sys.executable = request["executable"]
    paths = request["environment"].get("PYTHONPATH")
    own = [os.path.abspath(path) for path in paths.split(os.pathsep)] if paths else []  # "" is the working directory
    sys.path[:] = [*own, *sys.path[1:]]
    if request["module"]:
        sys.argv = [target, *arguments]
        sys.path.insert(0, os.getcwd()) if not request["safe_path"] else None
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [target, *arguments]
        sys.path.insert(0, str(Path(target).resolve().parent)) if not request["safe_path"] else None
        runpy.run_path(target, run_name="__main__")


def exit_now(code: object) -> None:
    """End as `sys.exit(code)` does, without the interpreter's clean-up, which takes longer than many commands."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if code is None else code & 0xFF if isinstance(code, int) else 1)


if __name__ == "__main__":
    import_libraries()
    gc.freeze()
    request = serve(sys.argv[1], int(sys.argv[2]))
    if request is not None:
        try:
            run(request)
        except SystemExit as end:
            exit_now(end.code)
        exit_now(None)
