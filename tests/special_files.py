"""What may lie in the place of a file in a folder from others."""

import os
import socket
from collections.abc import Callable
from pathlib import Path


def make_socket(path: Path) -> None:
    """Bind a socket; its own path may be longer than the 108 bytes that it takes."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def make_huge(path: Path) -> None:
    """Write a file of 10 GiB that takes no space."""
    with open(path, "wb") as file:
        file.truncate(10 << 30)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": make_socket,
    "folder": Path.mkdir,
    "huge": make_huge,
    "loop": lambda path: path.symlink_to(path.name),
}
"""Makes each kind at a path where nothing is yet."""


def replace(path: Path, kind: str) -> None:
    """Put a special file in the place of a file, which may be missing."""
    path.unlink(missing_ok=True)
    SPECIAL[kind](path)
