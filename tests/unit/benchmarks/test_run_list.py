"""Lists of benchmarks: limits, lanes and summaries; the commands of the shipped list exist."""

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "run_list.py"
SHIPPED = tomllib.loads((ROOT / "benchmarks" / "gpu_runs.toml").read_text(encoding="utf-8"))
OTHER_OPTIONS = {"benchmarks/regimes.py": "benchmarks/train_run.py"}


def summary(tmp_path: Path, entries: list[dict[str, object]], minutes: float) -> str:
    (tmp_path / "list.toml").write_text(tomli_w.dumps({"x": entries}), encoding="utf-8")
    words = ["list.toml", "out", "--group", "x", "--minutes", str(minutes)]
    subprocess.run([sys.executable, str(SCRIPT), *words], cwd=tmp_path, check=True, capture_output=True)
    return (tmp_path / "out" / "summary.txt").read_text(encoding="utf-8")


def test_a_command_keeps_its_output_and_its_exit_code(tmp_path: Path) -> None:
    text = summary(tmp_path, [{"run": "python -c 'import sys; print(sys.argv[1]); sys.exit(3)' {out}"}], 10)
    assert text.startswith("## 1 exit code 3, ")
    assert (tmp_path / "out" / "1" / "output.txt").read_text(encoding="utf-8") == f"{tmp_path}/out/1\n"


def test_commands_end_at_their_limit_with_what_they_started(tmp_path: Path) -> None:
    text = summary(
        tmp_path,
        [
            {"run": "sh -c 'echo on; sleep 987 & sleep 987'", "seconds": 3, "needs": 0},
            {"run": "sleep 988", "lane": "b", "needs": 0},
            {"run": "true", "lane": "b", "needs": 999},
        ],
        0.1,
    )
    assert "## 1 out of time, " in text
    assert "on\n" in text
    assert "## 2 out of time, " in text
    assert "## 3 not started, " in text
    running = subprocess.run(["pgrep", "-f", "sleep 98[78]"], capture_output=True, check=False)
    assert running.stdout == b""


@pytest.mark.parametrize("group", SHIPPED)
def test_the_shipped_commands_exist(group: str) -> None:
    for entry in SHIPPED[group]:
        assert entry.keys() <= {"run", "seconds", "needs", "lane"}
        program, script, *words = shlex.split(entry["run"])
        assert program == "python"
        if script == "-m":
            assert words[0] == "pytest"
            assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))
            continue
        sources = [script, OTHER_OPTIONS.get(script, script)]
        source = "".join((ROOT / path).read_text(encoding="utf-8") for path in sources)
        options = [word for word in words if word.startswith("--")]
        assert [option for option in options if f'"{option}"' not in source] == []
