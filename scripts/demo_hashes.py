"""Writes `hashes.json` beside the demo's assets: the sha256 of each file of weights and of each tokenizer.

    python scripts/demo_hashes.py [FOLDER] [--check]

With `--check` nothing is written; files that differ from the list or lack in it are named, and the exit code is 1.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[1] / "sd3_light" / "assets" / "demo"
PATTERNS = ("*/*.safetensors", "*/tokenizer.json")


def hashes(folder: Path) -> dict[str, str]:
    """sha256 by the path within the folder."""
    files = sorted(path for pattern in PATTERNS for path in folder.glob(pattern))
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def differences(folder: Path) -> list[str]:
    """One line for each file that exists and is not as listed; a listed file that is not there is no difference."""
    listed: dict[str, str] = json.loads((folder / "hashes.json").read_text(encoding="utf-8"))
    found = hashes(folder)
    return [
        f"{name}: {'differs' if name in listed else 'not listed'}" for name in found if found[name] != listed.get(name)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ASSETS)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        lines = differences(args.folder)
        print("\n".join(lines) or "all files are as listed")
        sys.exit(1 if lines else 0)
    text = json.dumps(hashes(args.folder), indent=1) + "\n"
    (args.folder / "hashes.json").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
