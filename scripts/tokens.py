"""Count the code tokens of each room: names, operators, numbers and strings, by Python 3.11.

python scripts/tokens.py [FOLDER] [--since COMMIT] [--renames COMMIT ...]

With ``--since``, definitions (functions, methods, statements outside of them) that existed at that commit are counted
apart from new ones. A definition existed if at least 0.3 of its lines are from then, by `git blame` with moves. Commits
that only rename (``--renames``) are passed over.
"""

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

KINDS = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
EXISTED = 0.3


def tokens_by_line(source: str) -> Counter[int]:
    """Return the number of code tokens that begin on each line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return Counter(token.start[0] for token in tokens if token.type in KINDS)


def definitions(body: list[ast.stmt]) -> Iterator[range]:
    """Yield the lines of each function, method and other statement."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body)
        else:
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
            yield range(first, (node.end_lineno or first) + 1)


def old_lines(path: Path, commits: set[str], renames: list[str]) -> set[int]:
    """Return the lines of a file that are from ``commits``."""
    command = ["git", "blame", "-w", "-M", "-C", "-s", "--abbrev=39"]
    command += [f"--ignore-rev={commit}" for commit in renames] + ["HEAD", "--", str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {number for number, line in enumerate(lines, 1) if line.split(" ", 1)[0].lstrip("^") in commits}


def existed(path: Path, commits: set[str], renames: list[str]) -> int:
    """Return the tokens of definitions that existed at the last of ``commits``."""
    source = path.read_text(encoding="utf-8")
    tokens = tokens_by_line(source)
    old = old_lines(path, commits, renames)
    total = 0
    for lines in definitions(ast.parse(source).body):
        written = [line for line in lines if tokens[line]]
        if written and sum(line in old for line in written) >= EXISTED * len(written):
            total += sum(tokens[line] for line in lines)
    return total


def main() -> None:
    """Print a line per room."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("sd3_light"))
    parser.add_argument("--since", help="a commit: count apart what existed then")
    parser.add_argument("--renames", nargs="*", default=[], help="commits that only rename")
    options = parser.parse_args()
    commits: set[str] = set()
    if options.since:
        listed = subprocess.run(["git", "rev-list", options.since], capture_output=True, text=True, check=True).stdout
        commits = set(listed.split())
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(options.folder.rglob("*.py")):
        inside = path.relative_to(options.folder).parts
        room = rooms[inside[0] if len(inside) > 1 else "."]
        room["all"] += sum(tokens_by_line(path.read_text(encoding="utf-8")).values())
        if commits:
            room["existed"] += existed(path, commits, options.renames)
    for name, room in [
        *sorted(rooms.items(), key=lambda item: -item[1]["all"]),
        ("sum", sum(rooms.values(), Counter())),
    ]:
        split = f"{room['existed']:10,} existed {room['all'] - room['existed']:10,} new" if commits else ""
        print(f"{name:14}{room['all']:10,}{split}")


if __name__ == "__main__":
    main()
