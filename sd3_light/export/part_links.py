"""The parts that training does not change: linked to the base's, or copied once for a whole series of exports."""

import filecmp
import os
import shutil
from collections.abc import Iterable
from pathlib import Path


def link_parts(base: Path, folder: Path, parts: Iterable[str], series: Path) -> None:
    """Put the parts of ``base`` into ``folder``: hard links, or copies where the file system cannot link to it.

    A copy is made once: later folders of ``series`` link to the earlier one's.
    """
    for part in parts:
        (folder / part).mkdir()
        for path in sorted((base / part).iterdir()):
            if path.is_file():
                _take(path, folder / part / path.name, series)


def _take(source: Path, target: Path, series: Path) -> None:
    source = source.resolve()  # a hub's cache holds links
    if _link(source, target):
        return
    for earlier in sorted(series.glob(f"*/{target.parent.name}/{target.name}")):
        if _is_copy(earlier, source) and _link(earlier, target):
            return
    shutil.copy2(source, target)  # with its time of change, by which it is known as a copy later
    if not filecmp.cmp(source, target, shallow=False):
        raise OSError(f"{target} is not what was copied from {source}")


def _is_copy(path: Path, source: Path) -> bool:
    ours, theirs = path.stat(), source.stat()
    return (ours.st_size, ours.st_mtime_ns) == (theirs.st_size, theirs.st_mtime_ns)


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:
        return False
    return True
