"""The parts that training does not change: linked to the base's files, or copied once per series of exports."""

import filecmp
import os
import shutil
from collections.abc import Iterable
from pathlib import Path


def link_parts(base: Path, folder: Path, parts: Iterable[str], series: Path) -> None:
    """Put parts of ``base`` into ``folder`` as hard links, or as copies where the file system cannot link.

    A copy is made once: later folders of ``series`` link to the copy in an earlier one.
    """
    for part in parts:
        (folder / part).mkdir()
        for path in sorted((base / part).iterdir()):
            if path.is_file():
                _link_or_copy(path, folder / part / path.name, series)


def _link_or_copy(source: Path, target: Path, series: Path) -> None:
    source = source.resolve()  # a hub cache contains symbolic links
    if _link(source, target):
        return
    for earlier in sorted(series.glob(f"*/{target.parent.name}/{target.name}")):
        if _is_copy(earlier, source) and _link(earlier, target):
            return
    shutil.copy2(source, target)  # keeps the modification time, which identifies the copy later
    if not filecmp.cmp(source, target, shallow=False):
        raise OSError(f"{target} differs from {source} after copying")


def _is_copy(path: Path, source: Path) -> bool:
    copy, original = path.stat(), source.stat()
    return (copy.st_size, copy.st_mtime_ns) == (original.st_size, original.st_mtime_ns)


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:
        return False
    return True
