"""Writes `hashes.json` of the demo's assets: the sha256 of each weight file and tokenizer.

    python scripts/demo_hashes.py [FOLDER] [--check]

With `--check` nothing is written; files that differ from the list or are not in it are printed, and the exit code is 1.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[1] / "sd3_light" / "assets" / "demo"
PATTERNS = ("*/*.safetensors", "*/tokenizer.json", "*/vocab.json", "*/merges.txt")


def hashes(folder: Path) -> dict[str, str]:
    """Return path within the folder -> sha256."""
    files = sorted(path for pattern in PATTERNS for path in folder.glob(pattern))
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def differences(folder: Path) -> list[str]:
    """Return one line per file that differs from the list. Listed files that do not exist are ignored."""
    listed: dict[str, str] = json.loads((folder / "hashes.json").read_text(encoding="utf-8"))
    actual = hashes(folder)
    return [
        f"{name}: {'differs' if name in listed else 'not listed'}"
        for name in actual
        if actual[name] != listed.get(name)
    ]


def write_hashes(folder: Path) -> str:
    """Write the list of a folder; returns its text."""
    text = json.dumps(hashes(folder), indent=1) + "\n"
    (folder / "hashes.json").write_text(text, encoding="utf-8")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ASSETS)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        lines = differences(args.folder)
        print("\n".join(lines) or "all files match the list")
        sys.exit(1 if lines else 0)
    print(write_hashes(args.folder), end="")


if __name__ == "__main__":
    main()
