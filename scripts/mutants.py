"""Change modules one place at a time, and count the changes that the tests notice.

    python scripts/mutants.py --draw > modules.txt
    python scripts/mutants.py --modules modules.txt --per-module 6 --seed 1 --out before.jsonl --tests OLD_CHECKOUT
    python scripts/mutants.py --modules modules.txt --same before.jsonl --out after.jsonl

A mutant is one changed place in a function. Its name is (module, function, operator, ordinal), with which ``--same``
finds it in another version. One copy of the checkout has all mutants, each behind a switch. The test files nearest to a
module run once, to see which tests execute which places. Then each mutant runs in a fork, with these tests only, until
one fails. ``--wide`` tries survivors again with all tests of their room and all that import a name of their module.
A line of modules.txt may have a second path: where the module is in that checkout. Results are JSON lines; the last one
of a mutant counts, and a run with the same ``--out`` continues an earlier one.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DRAW_SEED = 20261119
LOGIC = (ast.Compare, ast.BinOp, ast.BoolOp, ast.If, ast.Return)
LEAST_LOGIC = 15
NEAREST_FILES = 2
MOST_SECONDS = 25  # of one mutant's tests when they pass
SWITCH = """
import os

active = os.environ.get("MUTANT", "")
_seen = set()


def on(number):
    if active == "record":
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        line = f"{number}\\t{os.environ.get('MUTANT_FIXTURE') or test}\\n"
        if line not in _seen:
            _seen.add(line)
            with open(os.environ["MUTANT_RECORD"], "a") as file:
                file.write(line)
    return active == str(number)
"""
SWAPS: dict[type[ast.AST], type[Any]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult},
}
EMPTY = {"int": "0", "float": "0.0", "str": "''", "list": "[]", "dict": "dict()", "tuple": "()"}
CONDITIONS = {"always": "({}) or True", "never": "({}) and False", "not added": "not ({})"}
NOT_MUTATED = (ast.Raise, ast.Assert, ast.pattern)


class Mutator(ast.NodeTransformer):
    """Lists the places of a module, and puts those of ``chosen`` behind switches with their numbers."""

    def __init__(self, chosen: dict[tuple[str, str, int], int]) -> None:
        self.chosen = chosen
        self.places: list[dict[str, Any]] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.scope: list[str] = []
        self.returns: list[str] = []  # the annotations of the functions around

    def choose(self, node: Any, variants: Iterator[tuple[str, Any]]) -> Any:
        """Add the variants of a node to the places; return the node, behind switches if some are chosen."""
        result = node
        for operator, changed in variants:
            name = (".".join(self.scope), operator, self.counts[".".join(self.scope), operator])
            self.counts[name[:2]] += 1
            place = dict(zip(("function", "operator", "ordinal"), name, strict=True))
            change = f"{ast.unparse(node)[:80]} -> {ast.unparse(changed)[:80]}"
            self.places.append({**place, "number": len(self.places), "line": node.lineno, "change": change})
            if name in self.chosen:
                switch = ast.parse(f"_mutant_on({self.chosen[name]})", mode="eval").body
                is_statement = isinstance(node, ast.stmt)
                choice = ast.If(switch, [changed], [result]) if is_statement else ast.IfExp(switch, changed, result)
                result = ast.copy_location(choice, node)
        return result

    def visit(self, node: Any) -> Any:
        """Visit what runs in functions, children first."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return self.visit_body(node)
        if isinstance(node, NOT_MUTATED) or not self.returns:
            return node
        empty = self.empty_value(node)
        self.generic_visit(node)
        match node:
            case ast.If() | ast.IfExp():
                node.test = self.choose(node.test, ((name, formed(CONDITIONS[name], node.test)) for name in CONDITIONS))
            case ast.Slice(upper=ast.expr() as bound):
                node.upper = self.choose(bound, iter([("slice", formed("({}) - 1", bound))]))
            case ast.Slice(lower=ast.expr() as bound):
                node.lower = self.choose(bound, iter([("slice", formed("({}) - 1", bound))]))
            case ast.Return(value=ast.expr() as value) if empty:
                node.value = self.choose(value, iter([("return", formed(empty, value))]))
        return self.choose(node, variants(node))

    def visit_body(self, node: Any) -> Any:
        """Visit the body of a function or class: nothing else of it runs in a call."""
        self.scope.append(node.name)
        returns = self.returns
        if not isinstance(node, ast.ClassDef):
            self.returns = [*returns, ast.unparse(node.returns) if node.returns else ""]
        if node.name not in ("__repr__", "__str__"):
            node.body = [self.visit(child) for child in node.body]
        self.returns = returns
        self.scope.pop()
        return node

    def empty_value(self, node: ast.AST) -> str | None:
        """Return another value of the function's type, as source, if the node returns one."""
        if not isinstance(node, ast.Return) or node.value is None:
            return None
        kind = self.returns[-1]
        empty = "None" if kind.endswith("| None") else EMPTY.get(kind.partition("[")[0])
        return "not ({})" if kind == "bool" else empty if empty != ast.unparse(node.value) else None


def variants(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the operators that apply to a node, and what each makes of it."""
    changed = copy.deepcopy(node)
    match node:
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                changed = copy.deepcopy(node)
                changed.ops[index] = SWAPS[type(op)]()
                yield "comparison", changed
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS and not adds_texts(node):
            changed.op = SWAPS[type(op)]()
            yield "arithmetic", changed
        case ast.BoolOp(op=op):
            changed.op = SWAPS[type(op)]()
            yield "and-or", changed
        case ast.UnaryOp(op=ast.Not()):
            yield "not removed", changed.operand
        case ast.Constant(value=bool(value)):
            yield "boolean", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "integer", ast.Constant(value + 1)
        case ast.Expr(value=ast.Call()):
            yield "call removed", ast.Pass()
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            changed.func.id = "max" if name == "min" else "min"
            yield "min-max", changed
        case ast.Call(func=ast.Name(id="sorted")):
            yield "reversed", formed("({})[::-1]", node)


def adds_texts(node: Any) -> bool:
    """Return whether a side of a sum is a text, which has no minus."""
    sides = (getattr(node, "left", None), getattr(node, "right", None))
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides)


def formed(form: str, node: ast.expr) -> ast.expr:
    """Return an expression around another one."""
    return ast.parse(form.format(ast.unparse(node)), mode="eval").body


def instrumented(source: str, chosen: dict[tuple[str, str, int], int]) -> tuple[str, list[dict[str, Any]]]:
    """Return a module's source with the chosen places behind switches, and all its places."""
    tree = ast.parse(source)
    mutator = Mutator(chosen)
    tree.body = [mutator.visit(node) for node in tree.body]
    tree.body.insert(1, ast.parse("from mutant_switch import on as _mutant_on").body[0])  # after the docstring
    return ast.unparse(ast.fix_missing_locations(tree)), mutator.places


# --- what is measured --------------------------------------------------------------------------


def draw_modules(root: Path) -> list[str]:
    """Return a module with some logic per room."""
    rooms: dict[str, list[str]] = defaultdict(list)
    for path in sorted((root / "sd3_light").rglob("*.py")):
        count = sum(isinstance(node, LOGIC) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        name = path.relative_to(root).as_posix()
        if count >= LEAST_LOGIC and "kernels" not in name:
            rooms[room_of(name)].append(name)
    draw = random.Random(DRAW_SEED)
    return [draw.choice(rooms[room]) for room in sorted(rooms)]


def room_of(module: str) -> str:
    """Return the room of a module; "" of those in no folder."""
    return module.split("/")[1] if module.count("/") > 1 else ""


def drawn_places(module: str, places: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return the places in the order of a draw in which every operator comes once before any comes twice."""
    draw = random.Random(f"{seed}/{module}")
    shuffled = draw.sample(places, len(places))
    counts: Counter[str] = Counter()
    turns = []
    for place in shuffled:
        turns.append(counts[place["operator"]])
        counts[place["operator"]] += 1
    return [shuffled[index] for index in sorted(range(len(shuffled)), key=turns.__getitem__)]


def candidates(root: Path, module: str, wide: bool) -> list[str]:
    """Return the test files that import a module's names or belong to its room: the nearest ones, or all."""
    tree = ast.parse((root / module).read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    stem = Path(module).stem
    public = re.compile("|".join(rf"\b{name}\b" for name in [stem, *names] if not name.startswith("_")))
    words = re.compile("|".join(stem.split("_")))
    scores = {}
    for path in sorted((root / "tests" / "unit").rglob("test_*.py")):
        file = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        imports = re.findall(r"^ *from sd3_light[^\n(]* import (?:\([^)]*\)|.*)", text, re.M)
        near = path.stem.startswith(f"test_{stem}") or file.split("/")[2] == room_of(module)
        if near or any(public.search(line) for line in imports):
            own = 20 * path.stem.startswith(f"test_{stem}")
            scores[file] = own + 3 * len(public.findall(text)) + len(words.findall(text))
    ranked = sorted(scores, key=lambda file: -scores[file])
    return ranked if wide else ranked[:NEAREST_FILES]


class Measurement:
    """The plugin of one pytest session that collects; tests run in forks of it."""

    def __init__(self, mutants: list[dict[str, Any]], numbers: list[int], scratch: Path, out: Path) -> None:
        self.mutants = mutants
        self.numbers = numbers  # of all mutants in the tree, tried or not
        self.scratch = scratch
        self.out = out

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        """Name the shared fixture that is set up: what it executes, all its tests execute."""
        before = os.environ.get("MUTANT_FIXTURE", "")
        if fixturedef.scope != "function":
            os.environ["MUTANT_FIXTURE"] = fixture_name(fixturedef)
        try:
            return (yield)
        finally:
            os.environ["MUTANT_FIXTURE"] = before

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write the outcome of a phase of a test."""
        with (self.scratch / "reports").open("a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, report.failed, report.duration]) + "\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        """Measure in place of running the tests."""
        from tests import warm

        program = warm.install(self.scratch, os.getpid())
        warm.install = lambda folder, owner: program  # one server for all forks
        items = {item.nodeid: item for item in session.items}
        left = [mutant for mutant in self.mutants if not self.is_killed_again(session, items, mutant)]
        files = {file for mutant in left for file in mutant["files"]}
        items = {name: item for name, item in items.items() if name.split("::")[0] in files}
        hits, seconds = self.covered(session, items)
        for mutant in left:
            covering = hits.get(str(mutant["id"]), [])
            tests = [name for name in covering if name in items and name.split("::")[0] in mutant["files"]]
            costs: Counter[str] = Counter()
            for name in tests:
                costs[name.split("::")[0]] += seconds[name]
            tests.sort(key=lambda name: costs[name.split("::")[0]])  # files with short tests first
            result = self.tried(session, [items[name] for name in tests], seconds, mutant["id"])
            self.write(mutant, {"status": "at import"} if "" in covering else result)
        return True

    def is_killed_again(self, session: Any, items: dict[str, Any], mutant: dict[str, Any]) -> bool:
        """Return whether the test that killed a mutant in earlier results still does; write that."""
        test = mutant.pop("earlier", None)
        if test not in items:
            return False
        _, reports = self.in_fork(session, [items[test]], str(mutant["id"]), 2 * MOST_SECONDS)
        is_killed = any(has_failed for _, has_failed, _ in reports)
        if is_killed:
            self.write(mutant, {"status": "killed", "test": test})
        return is_killed

    def write(self, mutant: dict[str, Any], result: dict[str, Any]) -> None:
        """Write and print a result."""
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**mutant, **result}, ensure_ascii=False) + "\n")
        print(mutant["module"], mutant["function"], mutant["change"], result, flush=True)

    def covered(self, session: Any, items: dict[str, Any]) -> tuple[dict[str, list[str]], dict[str, float]]:
        """Return which tests execute which mutants, and the seconds of tests; run those not yet known."""
        path = self.out.with_suffix(".coverage.json")
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if known.get("numbers") != self.numbers:
            known = {"numbers": self.numbers, "hits": {}, "seconds": {}}
        hits, seconds = known["hits"], known["seconds"]
        new = [item for name, item in items.items() if name not in seconds]
        users = defaultdict(list)
        for item in new:
            for definitions in item._fixtureinfo.name2fixturedefs.values():
                users[fixture_name(definitions[-1])].append(item.nodeid)
        _, reports = self.in_fork(session, new, "record", 7200)
        failed = {name for name, has_failed, _ in reports if has_failed}
        for name, _, duration in reports:
            seconds[name] = seconds.get(name, 0.0) + duration
        record = self.scratch / "record"
        for line in record.read_text(encoding="utf-8").splitlines() if record.exists() else ():
            number, place = line.split("\t")
            tests = hits.setdefault(number, [])
            tests += [name for name in users.get(place, [place]) if name not in failed and name not in tests]
        print(f"{len(new)} tests, {sum(seconds.values()):.0f} s; without a mutant fail: {sorted(failed)}", flush=True)
        path.write_text(json.dumps(known), encoding="utf-8")
        return hits, seconds

    def tried(self, session: Any, items: list[Any], seconds: dict[str, float], number: int) -> dict[str, Any]:
        """Return what the tests that execute a mutant say about it."""
        if not items:
            return {"status": "not executed"}
        start = time.monotonic()
        total = 0.0
        chosen = []
        for item in items:
            total += seconds[item.nodeid]
            if total <= MOST_SECONDS or not chosen:
                chosen.append(item)
        ended, reports = self.in_fork(session, chosen, str(number), 4 * min(total, MOST_SECONDS) + 45)
        test = next((name for name, has_failed, _ in reports if has_failed), None)
        status = "survived" if test is None and ended else "killed"
        took = round(time.monotonic() - start, 1)
        return {"status": status, "test": test, "tests": len(items), "run": len(chosen), "seconds": took}

    def in_fork(self, session: Any, items: list[Any], active: str, limit: float) -> tuple[bool, list[Any]]:
        """Run tests with a mutant; return whether they ended in time and without a crash, and the reports."""
        reports = self.scratch / "reports"
        reports.write_text("", encoding="utf-8")
        process = os.fork()
        if process == 0:
            os.setsid()
            os.environ["MUTANT"] = active
            sys.modules["mutant_switch"].active = active  # type: ignore[attr-defined]
            session.config.pluginmanager.unregister(name="terminalreporter")
            session.config._tmp_path_factory._given_basetemp = self.scratch / "tmp"
            session.config.option.maxfail = 0 if active == "record" else 1
            session.items = items
            code = 0
            try:
                session.config.pluginmanager.subset_hook_caller("pytest_runtestloop", [self])(session=session)
            except session.Failed:
                pass
            except BaseException:  # an interrupt, which ends pytest without a failed test
                code = 1
            os._exit(code)
        end = time.monotonic() + limit
        ended = code = 0
        while not ended and time.monotonic() < end:
            time.sleep(0.02)
            ended, code = os.waitpid(process, os.WNOHANG)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        if not ended:
            os.waitpid(process, 0)
        for folder in ("tmp", "tree/.hypothesis"):
            shutil.rmtree(self.scratch / folder, ignore_errors=True)
        lines = reports.read_text(encoding="utf-8").splitlines()
        return bool(ended) and code == 0, [json.loads(line) for line in lines if line.endswith("]")]


def fixture_name(definition: Any) -> str:
    """Return a name of a fixture that no other one has."""
    return f"fixture {definition.baseid} {definition.argname}"


def name_of(mutant: dict[str, Any]) -> tuple[Any, ...]:
    """Return the name of a mutant."""
    return tuple(mutant[key] for key in ("module", "function", "operator", "ordinal"))


def latest(path: Path | None) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the last result of every mutant in a file, if there is one."""
    lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
    return {name_of(result): result for result in map(json.loads, lines)}


def chosen_places(options: argparse.Namespace, module: str, places: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the places of a module that become mutants: drawn, or those of earlier results."""
    if options.same is None:
        return drawn_places(module, places, options.seed)[: options.per_module]
    chosen = []
    for name, earlier in latest(options.same).items():
        if name[0] == module:
            same = [place for place in places if name_of({"module": module, **place}) == name]
            if not same and len(places) == earlier["places"]:
                same = [places[earlier["number"]]]  # a function has another name now
            chosen += [{**place, "earlier": earlier.get("test")} for place in same]
            if not same:
                print("no such place:", name)
    return chosen


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="print the drawn modules, one of each room")
    parser.add_argument("--modules", type=Path)
    parser.add_argument("--per-module", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--same", type=Path, help="use the mutants of these results")
    parser.add_argument("--tests", type=Path, default=ROOT, help="the checkout to measure")
    parser.add_argument("--wide", action="store_true", help="try survivors with more tests")
    options = parser.parse_args()
    if options.draw:
        print("\n".join(draw_modules(options.tests)))
        return
    scratch = Path(tempfile.mkdtemp(prefix="mutants-", dir="/dev/shm"))
    root = scratch / "tree"
    shutil.copytree(options.tests, root, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache"))
    (root / "mutant_switch.py").write_text(SWITCH, encoding="utf-8")
    done = latest(options.out)
    mutants: list[dict[str, Any]] = []
    numbers: list[int] = []
    for index, line in enumerate(options.modules.read_text(encoding="utf-8").splitlines()):
        module, *moved = line.split()
        path = moved[0] if moved else module
        source = (root / path).read_text(encoding="utf-8")
        _, places = instrumented(source, {})
        ids = {}
        for turn, place in enumerate(chosen_places(options, module, places)):
            mutant = {"id": 100 * index + turn, "module": module, **place, "places": len(places)}
            ids[name_of(mutant)[1:]] = mutant["id"]
            files = candidates(root, path, options.wide)
            file = (mutant.get("earlier") or "").split("::")[0]
            if file not in files and (root / file).is_file():
                files.append(file)
            earlier = done.get(name_of(mutant))
            if earlier is None or (options.wide and earlier["status"] in ("survived", "not executed")):
                mutants.append({**mutant, "files": files})
        numbers += ids.values()
        (root / path).write_text(instrumented(source, ids)[0], encoding="utf-8")
    mutants.sort(key=lambda mutant: mutant["id"] % 100)  # one of every module, then the second ones
    options.out = options.out.resolve()
    os.chdir(root)
    sys.path.insert(0, str(root))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, and so would tests
    os.environ |= {"PYTHONPATH": str(root), "MUTANT": "record", "MUTANT_RECORD": str(scratch / "record")}
    files = sorted({file for mutant in mutants for file in mutant["files"]})
    words = ["-n0", "-p", "no:cacheprovider", "-q", "-m", "not slow and not timed and not gpu"]
    try:
        pytest.main([*words, *files], [Measurement(mutants, numbers, scratch, options.out)])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
