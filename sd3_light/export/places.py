"""Names that something is to be written to: they are free, and what appears under them is whole.

While a file or folder is written it has a hidden name of its own beside its place, with the machine and the process in
it, so that two commands never meet and what a killed one left over is known as such.
"""

import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from sd3_light.config.faults import UserError
from sd3_light.data.files import machine

_DAY_SECONDS = 86400


def refuse_existing(out: Path) -> None:
    """A fault where something has this name already, be it a link to nowhere, or where nothing can have it."""
    try:
        os.lstat(out)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}; choose another name") from error
    raise UserError(f"{out} exists already; choose another name, nothing was changed")


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """What the disk refuses in this block is a fault of the place that the user gave."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {out}: {_reason(error)}; make room or choose another place") from error
    except SafetensorError as error:
        found = re.search(r"I/O error: (.*?) \(os error", str(error))  # the library has no other way to say it
        if found is None:
            raise
        raise UserError(f"cannot write {out}: {found[1]}; make room or choose another place") from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


@contextmanager
def new_folder(out: Path, replace: bool = False) -> Iterator[Path]:
    """A folder to fill, which takes the name ``out`` when the block ends well; it is gone when it does not.

    What has the name by then is a fault, or with ``replace`` steps aside and goes.
    """
    with unnamed_folder(out) as temporary:
        yield temporary
        if replace:
            _replace(temporary, out)
        else:
            refuse_existing(out)
            os.rename(temporary, out)  # fails where another command has put a folder there meanwhile


@contextmanager
def unnamed_folder(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` for what is needed to make it; gone at the end, unless it was renamed."""
    sweep(out)
    temporary = _hidden(out, "tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def new_file(out: Path) -> Iterator[Path]:
    """The name of a file to write, which becomes ``out`` when the block ends well; a file that is there stays."""
    sweep(out)
    temporary = _hidden(out, "tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        _give_name(temporary, out)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sweep(out: Path) -> None:
    """Remove what killed processes left over while they wrote ``out``; a folder that had stepped aside comes back."""
    if not out.parent.is_dir():
        return
    for path in sorted(out.parent.iterdir()):  # .old before .tmp
        if path.suffix in (".old", ".tmp") and _is_left_over(path, out):
            if path.suffix == ".old" and not os.path.lexists(out):
                os.replace(path, out)
            elif path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _is_left_over(path: Path, out: Path) -> bool:
    prefix = f".{out.name}."
    if not path.name.startswith(prefix) or path.name.count("~") < 2:
        return False
    host, pid, _ = path.name.removeprefix(prefix).rsplit("~", 2)
    with suppress(FileNotFoundError):
        gone = host == machine() and not os.path.exists(f"/proc/{pid}")
        return gone or time.time() - path.stat().st_mtime > _DAY_SECONDS
    return False


def _hidden(out: Path, kind: str) -> Path:
    return out.with_name(f".{out.name}.{machine()}~{os.getpid()}~{uuid.uuid4().hex[:8]}.{kind}")


def _give_name(temporary: Path, out: Path) -> None:
    try:
        os.link(temporary, out)
    except FileExistsError:
        refuse_existing(out)
    except OSError:  # a disk without links: a moment remains in which another command may take the name
        refuse_existing(out)
        os.rename(temporary, out)


def _replace(new: Path, out: Path) -> None:
    """Put ``new`` in the place of ``out``; a folder cannot be renamed over another, so the old one steps aside."""
    aside = _hidden(out, "old")
    if out.exists():
        os.replace(out, aside)
    try:
        os.replace(new, out)
    except OSError:
        if aside.exists():
            os.replace(aside, out)
        raise
    shutil.rmtree(aside, ignore_errors=True)
