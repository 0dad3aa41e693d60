"""Files that others wrote are opened in one place: `sd3_light/inputs.py` refuses pipes, devices and sockets there."""

import ast
from functools import cache
from pathlib import Path

import sd3_light

PACKAGE = Path(sd3_light.__file__).parent
OPENERS = {
    *("open", "read_text", "read_bytes", "copyfile", "copy2", "copytree", "memmap", "load_file", "safe_open"),
    *("memory_map", "ParquetFile", "from_file", "from_pretrained", "FileResponse", "put_file"),
    *("feather.read_table", "json.load", "np.load", "shutil.copy", "tomllib.load", "torch.load"),
}
"""Calls that open a path, by the last part of their name, or by two parts where that one has other meanings."""
CHECKS = {
    *("open_regular", "regular_handle", "require_regular", "read_limited", "read_json_file"),
    *("check_files", "check_header", "_regular"),  # of a model folder, of weights, of a Parquet file
}
"""One of them is called, or is the opener, in the same function."""
ALLOWED = {
    "this is the check": ["inputs.py:regular_handle"],
    "files of this package": [
        *("export/diffusers_folder.py:add_pipeline", "journeys.py:_prepare_demo", "pages/html.py:*"),
        *("families/sd3/fast/self_check.py:_sources_hash", "new/project_text.py:*"),
    ],
    "files of installed packages": ["evaluate/marked.py:require_marked"],
    "/proc": ["system.py:*"],
    "a folder, to flush it": ["checkpoint/store.py:_sync_folder"],
    "below a folder that is open, without following links, and checked to be regular": ["ui/served_files.py:*"],
    "an open file, bytes or a URL": [
        *("sources/preprocess.py:_open", "sources/tars.py:_members", "sources/video.py:*", "cache/caption.py:run"),
        "sources/parquet.py:table_rows",
        *("data/store/remote.py:_copy", "data/store/remote.py:_pieces", "data/store/disk_cache.py:_claimed"),
    ],
    "files that the same process, or its child, has just written, or that are private to it": [
        *("data/verify.py:_marked", "data/verify.py:_locked", "export/proof.py:run_clean_process", "files.py:_sync"),
        *("export/trained_file.py:write_trained", "export/trained_file.py:write_weights"),
        *("cache/build_folder.py:_upload", "ui/playground_routes.py:image"),
    ],
    "another process, for a folder that this package wrote and a base that it has opened before": [
        "export/proof_process.py:*"
    ],
}
"""`module:function`, or `module:*`, by reason."""


@cache
def calls_by_function() -> dict[str, list[ast.Call]]:
    """Return the calls by `module:function`, in outer functions and methods, and in the rest of each module."""
    found: dict[str, list[ast.Call]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        _collect(ast.parse(path.read_text(encoding="utf-8")), f"{path.relative_to(PACKAGE).as_posix()}:", found)
    return found


def _collect(node: ast.AST, place: str, found: dict[str, list[ast.Call]]) -> None:
    for child in ast.iter_child_nodes(node):
        is_outer = isinstance(child, ast.FunctionDef) and place.endswith(":")
        inner = f"{place}{child.name}" if is_outer else place  # type: ignore[attr-defined]
        if isinstance(child, ast.Call):
            found.setdefault(inner, []).append(child)
        _collect(child, inner, found)


def dotted(node: ast.expr) -> str:
    """Return the last two parts of a name; the first is empty for what is not a name."""
    if isinstance(node, ast.Attribute):
        return f"{node.value.id if isinstance(node.value, ast.Name) else ''}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def opener(call: ast.Call) -> str | None:
    """Return the name of a call that opens a path to read or to change it; None for others."""
    name = dotted(call.func)
    last = name.split(".")[-1]
    if last == "open" and name != "os.open":
        modes = [*call.args[name == "open" :][:1], *(word.value for word in call.keywords if word.arg == "mode")]
        if any(isinstance(mode, ast.Constant) and set("wx") & set(str(mode.value)) for mode in modes):
            return None
    return name if last in OPENERS or name in OPENERS else None


def test_files_of_others_are_checked_before_they_are_opened() -> None:
    allowed = {place for places in ALLOWED.values() for place in places}
    faults = []
    for place, calls in calls_by_function().items():
        names = [name for call in calls if (name := opener(call))]
        checks = {dotted(call.func) for call in calls}
        checks |= {dotted(word.value) for call in calls for word in call.keywords if word.arg == "opener"}
        is_allowed = place in allowed or f"{place.split(':')[0]}:*" in allowed
        if names and not checks & CHECKS and not is_allowed:
            faults.append(f"{place}: {', '.join(names)}")
    assert not faults, "open these with sd3_light/inputs.py, or list them in ALLOWED:\n" + "\n".join(faults)
    places = {place for place, calls in calls_by_function().items() if any(map(opener, calls))}
    places |= {f"{place.split(':')[0]}:*" for place in places}
    assert {place for listed in ALLOWED.values() for place in listed} <= places
