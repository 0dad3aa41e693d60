"""The files that install and check the package elsewhere: Makefile, Dockerfile and the GitHub workflow."""

import os
import re
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import check_package
from sd3_light import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
PINS = {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", CONSTRAINTS, re.M)}
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "ENV", "ENTRYPOINT", "CMD", "USER", "LABEL"}


def pinned_torch() -> str:
    (line,) = re.findall(r"^torch==.*$", CONSTRAINTS, re.MULTILINE)
    return str(line)


def instructions() -> list[tuple[str, str]]:
    """Return (name, arguments) of the Dockerfile's instructions, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(name, arguments) for name, _, arguments in (line.partition(" ") for line in lines if line.strip())]


def test_the_dockerfile_is_valid_and_installs_what_is_tested() -> None:
    parsed = instructions()
    assert parsed[0][0] == "FROM"
    assert {name for name, _ in parsed} <= INSTRUCTIONS
    for name, arguments in parsed:
        if name == "COPY":
            *sources, _ = arguments.split()
            ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
            for source in sources:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, f".dockerignore leaves {source} out of the build"
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", arguments], check=True)
        if name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in yaml.safe_load(arguments))
    assert ("ARG", f"TORCH={pinned_torch()}") in instructions()
    (steps,) = (arguments.split("&&") for name, arguments in instructions() if "pip install" in arguments)
    installs = [step.split() for step in steps if "install" in step]
    locked, torch, package = installs
    assert {"--require-hashes", "--no-deps", "requirements.lock"} <= set(locked)
    assert '"${TORCH}"' in torch
    assert {"--no-deps", "."} <= set(package)
    assert steps[-1].split() == ["pip", "check"]


def locked_versions(name: str) -> dict[str, str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return {canonicalize_name(one): version for one, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


def needed_by(extras: set[str]) -> set[str]:
    """Return the direct dependencies of the package with these extras."""
    listed = [*PROJECT["dependencies"], *(one for extra in extras for one in PROJECT["optional-dependencies"][extra])]
    requirements = [Requirement(one) for one in listed]
    nested = {extra for one in requirements if one.name == "sd3-light" for extra in one.extras}
    names = {canonicalize_name(one.name) for one in requirements if one.name != "sd3-light"}
    return names | needed_by(nested) if nested else names


@pytest.mark.parametrize(
    ("name", "extras"), [("requirements.lock", {"bnb", "s3"}), ("requirements-dev.lock", {"bnb", "s3", "dev"})]
)
def test_a_lock_has_the_tested_versions_and_a_hash_of_each(name: str, extras: set[str]) -> None:
    locked = locked_versions(name)
    assert {one: version for one, version in locked.items() if PINS.get(one, version) != version} == {}
    # setuptools is the build tool of the environment; the others have markers of other platforms
    assert set(locked) - set(PINS) <= {"setuptools", "colorama", "pywin32", "httpx2-jsfetch"}
    assert needed_by(extras) - set(locked) == {"torch"}
    blocks = re.split(r"^(?=[\w.-]+==)", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [block for block in blocks if block and "--hash=sha256:" not in block] == []


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_a_lock_names_no_index_and_no_build_of_torch(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert re.findall(r"://|^--?\w.*|\bfile:", text, re.MULTILINE) == []
    builds = ("torch", "triton", "nvidia-", "cuda-")
    assert [one for one in locked_versions(name) if one.startswith(builds)] == []


def test_the_workflows_check_every_python_with_the_tested_versions() -> None:
    workflow: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    (step,) = (step for step in job["steps"] if step.get("run") == ".ci/run")
    assert step["env"]["LOCK"] in [path.name for path in ROOT.glob("*.lock")]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert f">={job['strategy']['matrix']['python'][0]}" == PROJECT["requires-python"]
    listed = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    assert listed == set(job["strategy"]["matrix"]["python"])
    job = package_jobs()["install"]
    matrix = job["strategy"]["matrix"]
    assert set(matrix) == {"python", "dependencies"}  # nothing is excluded
    assert set(matrix["python"]) == listed
    assert tuple(matrix["dependencies"]) == check_package.DEPENDENCY_SETS
    (command,) = (step["run"] for step in job["steps"] if "check_package" in step.get("run", ""))
    for dependencies in matrix["dependencies"]:
        words = command.replace("${{ matrix.dependencies }}", dependencies).split()
        assert words[:2] == ["python", "scripts/check_package.py"]
        assert check_package.parser().parse_args(words[2:]).dependencies == dependencies
    assert {"python-version": "${{ matrix.python }}"} in [step.get("with") for step in job["steps"]]
    tools = {Requirement(one).name for one in PROJECT["optional-dependencies"]["release"]}
    installs = [step["run"] for job in package_jobs().values() for step in job["steps"] if "pip install" in str(step)]
    prefix = "pip install --constraint constraints.txt "
    assert all(command.startswith(prefix) for command in installs)
    assert {word for command in installs for word in command.removeprefix(prefix).split()} == tools
    assert [tool for tool in tools if not re.search(rf"^{tool}==", CONSTRAINTS, re.MULTILINE)] == []
    (command,) = (step["run"] for step in package_jobs()["audit"]["steps"] if "pip-audit --" in step.get("run", ""))
    words = command.split()
    assert words[words.index("--requirement") + 1] == "constraints.txt"
    assert "--strict" in words


def package_jobs() -> dict[str, Any]:
    workflow: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/package.yml").read_text(encoding="utf-8"))
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML reads the key `on` as true
    assert list(workflow[True]["push"]) == ["tags"]
    jobs: dict[str, Any] = workflow["jobs"]
    return jobs


def test_the_lowest_versions_and_the_page_of_dependencies_are_those_of_the_project() -> None:
    pins = [Requirement(one) for one in check_package.constraints_of("lowest", has_torch=False)]
    by_name = {one.name: one.specifier for one in map(Requirement, PROJECT["dependencies"])}
    assert set(by_name) <= {pin.name for pin in pins}
    for pin in pins:
        (version,) = (one.version for one in pin.specifier)
        assert version in by_name.get(pin.name, pin.specifier)
    assert check_package.lower_bounds(["a>=1.2,<3", "b[x]==4.0"]) == ["a==1.2", "b==4.0"]
    with pytest.raises(ValueError, match="no lower bound"):
        check_package.lower_bounds(["a<3"])
    assert [one for one in check_package.constraints_of("pinned", has_torch=True) if one.startswith("torch==")] == []
    assert check_package.constraints_of("newest", has_torch=False) == []
    text = (ROOT / "docs" / "reference" / "dependencies.md").read_text(encoding="utf-8")
    package, extras = text.partition("## Extras")[::2]
    direct = {Requirement(one).name for one in PROJECT["dependencies"]}
    assert set(re.findall(r"^\| ([\w-]+) \|", package, re.MULTILINE)) - {"package"} == direct
    listed: dict[str, set[str]] = {}
    for extra, names in re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", extras, re.MULTILINE):
        listed.setdefault(extra, set()).update(names.split(", "))
    optional = PROJECT["optional-dependencies"]
    assert set(listed) == set(optional)
    for extra, names in listed.items():
        assert names <= {Requirement(one).name for one in optional[extra]}, extra
    everything = {Requirement(one).name for group in optional.values() for one in group} - {"sd3-light"}
    assert set().union(*listed.values()) == everything


def test_a_file_of_the_checkout_in_the_wheel_is_an_error(tmp_path: Path) -> None:
    wheel = tmp_path / "sd3_light-0.1.0-py3-none-any.whl"
    sdist = tmp_path / "sd3_light-0.1.0.tar.gz"
    names = subprocess.run(["git", "ls-files", "sd3_light"], cwd=ROOT, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names.stdout.splitlines():
            archive.write(ROOT / name, name)
    with tarfile.open(sdist, "w:gz") as archive:
        for name in ("pyproject.toml", "LICENSE", "README.md", "sd3_light/__init__.py"):
            archive.add(ROOT / name, f"sd3_light-0.1.0/{name}")
    assert "the demo's weights take" in check_package.check_contents(sdist, wheel)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tests/conftest.py", "")
    with pytest.raises(check_package.StepError, match=r"files of the checkout: tests/conftest\.py"):
        check_package.check_contents(sdist, wheel)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(ROOT / "sd3_light/__init__.py", "sd3_light/__init__.py")
    with pytest.raises(check_package.StepError, match=r"lacks sd3_light/py\.typed"):
        check_package.check_contents(sdist, wheel)


def test_a_failed_step_is_one_line_that_names_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as failure, check_package.step("demo"):
        check_package.run(["bash", "-c", "echo no weights; exit 3"], ROOT)
    assert re.fullmatch(r"error: demo, after 0 s: bash .*: exit code 3 \| no weights", str(failure.value))
    with check_package.step("contents"):
        check_package.run(["true"], ROOT)
    assert re.fullmatch(r"contents: \d+\.\d s\n", capfd.readouterr().out)


def test_an_install_without_constraints_stays_near_the_tested_versions() -> None:
    """Every tested version is supported; the next releases of the libraries that break most are not taken untested."""
    supported = {canonicalize_name(one.name): one.specifier for one in map(Requirement, PROJECT["dependencies"])}
    assert [name for name, versions in supported.items() if PINS[name] not in versions] == []
    for name, untested in {"torch": "2.14", "numpy": "2.5", "pillow": "13.0", "huggingface-hub": "3.0"}.items():
        assert untested not in supported[name], name
    assert all(version in supported["torch"] for version in ("2.11.0", "2.12.0", "2.13.0"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    assert citation["keywords"] == PROJECT["keywords"]
    assert all(citation[key] for key in ("message", "title", "abstract", "authors"))


@pytest.mark.parametrize(("tool", "backend"), [("uv", "auto"), ("uv", "cu128"), ("pip", "")])
def test_make_installs_the_torch_of_the_machine(tmp_path: Path, tool: str, backend: str) -> None:
    """uv chooses the build by the driver; without it, pip takes that of the index."""
    (tmp_path / "bin").mkdir()
    for name in ("bash", "sh", "make", "grep", "python3"):
        found = next(Path(p, name) for p in os.defpath.split(":") if Path(p, name).exists())
        (tmp_path / "bin" / name).symlink_to(found)
    if tool == "uv":
        (tmp_path / "bin" / "uv").write_text("#!/bin/sh\n", encoding="utf-8")
        (tmp_path / "bin" / "uv").chmod(0o755)
    choice = [f"TORCH_BACKEND={backend}"] if backend not in ("", "auto") else []
    command = ["make", "-n", "-C", str(ROOT), f"VENV={tmp_path}/venv", *choice, f"{tmp_path}/venv/.run-installed"]
    environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in printed.splitlines() if pinned_torch() in line)
    assert line.startswith("uv pip install") if tool == "uv" else "-m pip" in line
    assert (f"--torch-backend {backend}" in line) == (tool == "uv")


def test_make_installs_from_a_lock_before_torch(tmp_path: Path) -> None:
    """pip leaves what is installed in the right version, so torch's dependencies are those of the lock."""
    variables = [f"VENV={tmp_path}/venv", "LOCK=some.lock"]
    command = ["make", "-n", "-C", str(ROOT), *variables, f"{tmp_path}/venv/.run-installed"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 0 < printed.index("--no-deps --require-hashes --requirement some.lock") < printed.index(pinned_torch())


def test_the_job_files_of_the_page_are_valid() -> None:
    text = (ROOT / "docs" / "reference" / "multi-node.md").read_text(encoding="utf-8")
    scripts = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", text, re.DOTALL)
    assert len(scripts) >= 2
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    kinds = [part["kind"] for block in blocks for part in yaml.safe_load_all(block)]
    assert kinds == ["Service", "Job", "Job", "Job", "RayJob"]
