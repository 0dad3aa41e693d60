"""The fast stand-in for `python` behaves like the interpreter."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.waiting import HANG_SECONDS, wait_until
from tests.warm import ENVIRONMENT, REAL_PYTHON
from tests.warm.client import IMPORT_VARIABLES, RUNTIME_VARIABLES

SHOW = "import os, sys; print(sys.argv[1:], os.getcwd(), 'torch' in sys.modules, 'sd3_light' in sys.modules)"
WAIT = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def _servers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what module fixtures of other tests, or libraries that they imported, have left in the environment."""
    for name in {*ENVIRONMENT, *os.environ} - {"PYTHONPATH"}:
        matters = IMPORT_VARIABLES.match(name) and not RUNTIME_VARIABLES.match(name)
        if matters and os.environ.get(name) != ENVIRONMENT.get(name):
            warnings.warn(f"earlier tests changed {name}, so that later ones start slowly", stacklevel=1)
            monkeypatch.delenv(name, raising=False)
            if name in ENVIRONMENT:
                monkeypatch.setenv(name, ENVIRONMENT[name])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def run(*arguments: object, **options: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_a_script_runs_with_the_libraries_and_without_this_package(script: Path, tmp_path: Path) -> None:
    script.write_text(SHOW)
    assert sys.executable != REAL_PYTHON
    assert run(script, "a", "b", cwd=tmp_path).stdout == f"['a', 'b'] {tmp_path} True False\n"
    script.write_text("import sys; sys.exit(int(sys.argv[1]))")
    assert [run(script, code).returncode for code in (0, 2, 75)] == [0, 2, 75]
    script.write_text("raise ValueError('wrong')")
    done = run(script)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: wrong\n")


@pytest.mark.parametrize("options", [{"HF_HOME": "elsewhere"}, {"PYTHONHASHSEED": "1"}])
def test_variables_that_libraries_read_at_import_start_a_new_interpreter(script: Path, options: dict[str, str]) -> None:
    script.write_text(SHOW)
    assert "False False" in run(script, env={**os.environ, **options}).stdout
    for variable in ("RANK", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        assert "True False" in run(script, env={**os.environ, variable: "1"}).stdout
    assert "False False" in run("-c", SHOW).stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signals_and_death_are_passed_on(script: Path, number: signal.Signals) -> None:
    handle = "signal.signal(signal.SIGINT, lambda *_: os._exit(9))"
    script.write_text(f"import os, signal; {handle}; print(os.getpid())\n{WAIT}")
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    process.stdout.readline()
    process.send_signal(number)
    assert process.wait(HANG_SECONDS) == (9 if number == signal.SIGINT else -number)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), lambda: "the process outlived its stand-in")


@pytest.mark.parametrize("python", [REAL_PYTHON, None])
def test_the_working_directory_is_imported_as_usual(script: Path, tmp_path: Path, python: str | None) -> None:
    """Not with `-P` or its variable, but with an empty entry of PYTHONPATH."""
    folder, name = tmp_path / "folder", "lies_here"
    folder.mkdir()
    (folder / f"{name}.py").write_text("print('imported')")
    script.write_text(f"import importlib.util; print(importlib.util.find_spec({name!r}) is not None)")

    def finds(*arguments: str, **variables: str) -> bool:
        command = [python or sys.executable, *arguments]
        environment = {**os.environ, **variables}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        return done.stdout in ("True\n", "imported\n")

    assert finds("-m", name)
    assert not finds("-P", "-m", name)
    assert not finds("-m", name, PYTHONSAFEPATH="1")
    assert not finds("-P", str(script), PYTHONPATH=str(tmp_path))
    assert finds("-P", str(script), PYTHONPATH=f"{tmp_path}:")
