"""A folder from a stranger: a file lies in it for every module that Python could import from there."""

import sys
from importlib.metadata import packages_distributions
from pathlib import Path

_CODE = """import os, sys
with open({note!r}, "a", encoding="utf-8") as file:
    print(__name__, *sys.orig_argv, file=file)
raise ImportError("a file of the working directory was executed")
"""


def plant(folder: Path) -> Path:
    """Write such files; return the path of the file in which each of them notes that it was executed."""
    note = folder.parent / f"{folder.name}-executed.txt"
    folder.mkdir(parents=True, exist_ok=True)
    names = {*sys.stdlib_module_names, *packages_distributions(), "sd3_light", "sitecustomize", "usercustomize"}
    for name in sorted(name for name in names if name.isidentifier()):
        (folder / f"{name}.py").write_text(_CODE.format(note=str(note)), encoding="utf-8")
    return note
