"""Lists of benchmarks: limits, lanes and summaries; every command of the shipped list can start."""

import runpy
import shlex
import subprocess
import sys
import tarfile
import tomllib
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import tomli_w

from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "run_list.py"
SHIPPED = tomllib.loads((ROOT / "benchmarks" / "gpu_runs.toml").read_text(encoding="utf-8"))
ENTRIES = [entry for entries in SHIPPED.values() for entry in entries]


def summary(tmp_path: Path, groups: dict[str, list[dict[str, object]]], minutes: float, *words: str) -> str:
    (tmp_path / "list.toml").write_text(tomli_w.dumps(groups), encoding="utf-8")
    words = ("list.toml", "out", "--group", *groups, "--minutes", str(minutes), *words)
    subprocess.run([sys.executable, str(SCRIPT), *words], cwd=tmp_path, check=True, capture_output=True)
    return (tmp_path / "out" / "summary.txt").read_text(encoding="utf-8")


def test_a_command_keeps_its_output_and_its_exit_code(tmp_path: Path) -> None:
    entry = {"run": "python -c 'import sys; print(sys.argv[1]); sys.exit(3)' {out}"}
    text = summary(tmp_path, {"x": [entry]}, 10)
    assert text.startswith("## 1 exit code 3, ")
    assert (tmp_path / "out" / "1" / "output.txt").read_text(encoding="utf-8") == f"{tmp_path}/out/1\n"


def test_commands_end_at_their_limit_with_what_they_started(tmp_path: Path) -> None:
    first = {"run": "sh -c 'echo on; sleep 987 & sleep 987'", "seconds": 3, "needs": 0}
    others = [{"run": "sleep 988", "lane": "b", "needs": 0}, {"run": "true", "lane": "b", "needs": 999}]
    text = summary(tmp_path, {"x": [first, *others]}, 0.1)
    assert "## 1 out of time, " in text
    assert "on\n" in text
    assert "## 2 out of time, " in text
    assert "## 3 not started, " in text
    running = subprocess.run(["pgrep", "-f", "sleep 98[78]"], capture_output=True, check=False)
    assert running.stdout == b""


def test_groups_run_one_after_another_and_results_are_packed(tmp_path: Path) -> None:
    wait = "import pathlib, sys, time; time.sleep(1); pathlib.Path(sys.argv[1], 'kept.json').write_text('1')"
    late = "import pathlib, sys; print(pathlib.Path(sys.argv[1], '../1/kept.json').exists())"
    groups = {"x": [{"run": f'python -c "{wait}" {{out}}'}], "y": [{"run": f'python -c "{late}" {{out}}', "lane": "b"}]}
    summary(tmp_path, groups, 9, "--pack", "packed")
    assert (tmp_path / "out" / "2" / "output.txt").read_text(encoding="utf-8") == "True\n"
    assert {path.name for path in (tmp_path / "packed").iterdir()} == {"summary.txt", "results.tar.gz"}
    with tarfile.open(tmp_path / "packed" / "results.tar.gz") as archive:
        assert {"summary.txt", "1/kept.json", "2/output.txt"} <= set(archive.getnames())


def test_a_command_that_is_cut_off_has_its_results_packed(scripts: SimpleNamespace, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "1").mkdir(parents=True)
    (out / "1" / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    (out / "1" / "large.json").write_bytes(bytes(scripts.run_list.PACKED_BYTES))
    (out / "1" / "weights.safetensors").write_bytes(bytes(8))
    scripts.run_list.PACK_SECONDS = 0.01
    with scripts.run_list.packing(out, tmp_path / "packed"):
        wait_until((tmp_path / "packed" / "results.tar.gz").exists)  # while commands run
    with tarfile.open(tmp_path / "packed" / "results.tar.gz") as archive:
        sizes = {entry.name: entry.size for entry in archive}
    assert sizes == {"1/rows.jsonl": 3, "1/large.json": 0}


class Parsed(Exception):
    """The arguments of a script are valid."""


def parsed(script: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Return what a benchmark makes of its arguments, before it starts."""

    def stop(parser: ArgumentParser, *_: object) -> NoReturn:
        known, others = real(parser)
        if others:
            parser.error(f"unknown: {others}")
        raise Parsed(known)

    real = ArgumentParser.parse_known_args
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [script, *words])
        patch.setattr(ArgumentParser, "parse_args", stop)
        patch.setattr(ArgumentParser, "parse_known_args", stop)
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        with pytest.raises(Parsed) as result:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    return result.value.args[0]


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry["run"][:60] for entry in ENTRIES])
def test_the_shipped_commands_parse(entry: dict[str, Any], scripts: SimpleNamespace, monkeypatch: Any) -> None:
    scripts.run_list.Entry(1, folder=ROOT, **entry)
    program, script, *words = shlex.split(entry["run"].replace("{out}", "out"))
    assert program == "python"
    if script == "-m":
        assert words[0] == "pytest"
        assert all((ROOT / word.partition("::")[0]).is_file() for word in words if ".py" in word)
        return
    options = parsed(script, words, monkeypatch)
    if script.endswith("real_size.py"):
        model = scripts.models.Model(options.family, options.depth, options.encoders)
        plan = scripts.real_size.Plan(ROOT, model, 1)
        assert set(options.journey) <= {journey.name for journey in plan.journeys()}


def test_a_wrong_option_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        parsed("benchmarks/peers.py", ["out", "--row", "no-such-row"], monkeypatch)
