"""Files that are either absent, what they were, or whole; and which machine wrote them."""

import hashlib
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sd3_light.config.faults import UserError

_DAY_SECONDS = 86400


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its name when the block ends well: absent, as it was, or whole.

    The temporary name is this process's own on any machine, so two writers of one file never meet.
    """
    temporary = path.with_name(f".{path.name}~{machine()}~{os.getpid()}~{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; make room or mend the disk and start again: what is written stays"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove temporary files of killed processes: of this machine and gone, or untouched for a day."""
    for path in (*folder.glob(".*~*.tmp"), *folder.glob(".tmp*")):
        # those without a machine are a library's own
        _, host, pid, _ = path.name.rsplit("~", 3) if "~" in path.name else ("", "", "", "")
        gone = host == machine() and not os.path.exists(f"/proc/{pid}")
        with suppress(FileNotFoundError):
            if gone or time.time() - path.stat().st_mtime > _DAY_SECONDS:
                path.unlink()


def write_atomically(path: Path, data: bytes) -> None:
    """The file at ``path`` is either absent, what it was, or whole."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def file_sha256(path: Path) -> str:
    """The hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def machine() -> str:
    """Which processes can be looked up by their number: those of one boot and one namespace of process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:  # not Linux: the host's name and the sign of life have to do
        boot = space = "0"
    return f"{socket.gethostname()}-{boot}-{space}"


def damaged_mark(shard: Path) -> Path:
    """The file that says that a shard was found damaged: the cache stage encodes it again."""
    return shard.with_name(f"{shard.name}.damaged")
