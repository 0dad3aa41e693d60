"""The files that install and check the package elsewhere: Makefile, Dockerfile and the GitHub workflow."""

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sd3_light import __version__

ROOT = Path(__file__).parents[2]
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "ENV", "ENTRYPOINT", "CMD", "USER", "LABEL"}


def pinned_torch() -> str:
    (line,) = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    return str(line)


def instructions() -> list[tuple[str, str]]:
    """Return (name, arguments) of the Dockerfile's instructions, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(name, arguments) for name, _, arguments in (line.partition(" ") for line in lines if line.strip())]


def test_the_dockerfile_has_valid_instructions_and_sources() -> None:
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


def test_the_dockerfile_installs_the_tested_torch() -> None:
    assert ("ARG", f"TORCH={pinned_torch()}") in instructions()


def test_the_dockerfile_verifies_what_it_installs_before_torch() -> None:
    (steps,) = (arguments.split("&&") for name, arguments in instructions() if "pip install" in arguments)
    installs = [step.split() for step in steps if "install" in step]
    locked, torch, package = installs
    assert {"--require-hashes", "--no-deps", "requirements.lock"} <= set(locked)
    assert '"${TORCH}"' in torch
    assert {"--no-deps", "."} <= set(package)
    assert steps[-1].split() == ["pip", "check"]


def locked_versions(name: str) -> dict[str, str]:
    """Return the packages of a lock and their versions."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return {canonicalize_name(one): version for one, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


def needed_by(extras: set[str]) -> set[str]:
    """Return the direct dependencies of the package with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    requirements = [Requirement(one) for one in listed]
    nested = {extra for one in requirements if one.name == "sd3-light" for extra in one.extras}
    names = {canonicalize_name(one.name) for one in requirements if one.name != "sd3-light"}
    return names | needed_by(nested) if nested else names


@pytest.mark.parametrize(
    ("name", "extras"), [("requirements.lock", {"bnb", "s3"}), ("requirements-dev.lock", {"bnb", "s3", "dev"})]
)
def test_a_lock_has_the_tested_versions_and_a_hash_of_each(name: str, extras: set[str]) -> None:
    pins = re.findall(
        r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8").replace("_", "-"), re.MULTILINE
    )
    tested = {canonicalize_name(one): version for one, version in pins}
    locked = locked_versions(name)
    assert {one: version for one, version in locked.items() if tested.get(one, version) != version} == {}
    # setuptools is the build tool of the environment; the others have markers of other platforms
    assert set(locked) - set(tested) <= {"setuptools", "colorama", "pywin32", "httpx2-jsfetch"}
    assert needed_by(extras) - set(locked) == {"torch"}
    blocks = re.split(r"^(?=[\w.-]+==)", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [block for block in blocks if block and "--hash=sha256:" not in block] == []


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_a_lock_names_no_index_and_no_build_of_torch(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert re.findall(r"://|^--?\w.*|\bfile:", text, re.MULTILINE) == []
    builds = ("torch", "triton", "nvidia-", "cuda-")
    assert [one for one in locked_versions(name) if one.startswith(builds)] == []


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == __version__
    assert citation["license"] == project["license"]
    assert citation["keywords"] == project["keywords"]
    assert all(citation[key] for key in ("message", "title", "abstract", "authors"))


def test_the_workflow_runs_the_checks_on_every_supported_python() -> None:
    workflow: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    (step,) = (step for step in job["steps"] if step.get("run") == ".ci/run")
    assert step["env"]["LOCK"] in [path.name for path in ROOT.glob("*.lock")]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f">={job['strategy']['matrix']['python'][0]}" == project["requires-python"]
    listed = {line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)}
    assert listed == set(job["strategy"]["matrix"]["python"])


def test_an_install_without_constraints_stays_near_the_tested_versions() -> None:
    """Every tested version is supported; the next releases of the libraries that break most are not taken untested."""
    pins = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    tested = {canonicalize_name(name): version for name, version in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = {canonicalize_name(one.name): one.specifier for one in map(Requirement, project["dependencies"])}
    assert [name for name, versions in supported.items() if tested[name] not in versions] == []
    for name, untested in {"torch": "2.14", "numpy": "2.5", "pillow": "13.0", "huggingface-hub": "3.0"}.items():
        assert untested not in supported[name], name
    assert all(version in supported["torch"] for version in ("2.11.0", "2.12.0", "2.13.0"))


@pytest.mark.parametrize(("tool", "backend"), [("uv", "auto"), ("uv", "cu128"), ("pip", "")])
def test_make_installs_the_torch_of_the_machine(tmp_path: Path, tool: str, backend: str) -> None:
    """uv chooses the build by the driver; without it, pip takes that of the index."""
    (tmp_path / "bin").mkdir()
    for name in ("bash", "sh", "make", "grep", "python3"):
        (tmp_path / "bin" / name).symlink_to(
            next(Path(p, name) for p in os.defpath.split(":") if Path(p, name).exists())
        )
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
    command = [
        "make",
        "-n",
        "-C",
        str(ROOT),
        f"VENV={tmp_path}/venv",
        "LOCK=some.lock",
        f"{tmp_path}/venv/.run-installed",
    ]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 0 < printed.index("--no-deps --require-hashes --requirement some.lock") < printed.index(pinned_torch())


def test_the_job_files_of_the_page_are_valid() -> None:
    text = (ROOT / "docs" / "reference" / "multi-node.md").read_text(encoding="utf-8")
    scripts = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", text, re.DOTALL)
    assert len(scripts) >= 2
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    kinds = [
        part["kind"]
        for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
        for part in yaml.safe_load_all(block)
    ]
    assert kinds == ["Service", "Job", "Job", "Job", "RayJob"]
