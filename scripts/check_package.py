"""Builds the sdist and the wheel, installs the wheel in a new environment outside the checkout, and uses it there.

    python scripts/check_package.py --dependencies lowest --python python3.11

The environment of this script needs `build` and `twine` (the extra `release`). The dependencies are those of
constraints.txt (`pinned`), the newest that the package allows (`newest`), or the lower bounds of pyproject.toml
(`lowest`). Every step prints its name and its seconds; a failure ends with one line that names the step.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEPENDENCY_SETS = ("pinned", "newest", "lowest")
# what `sd3-light` needs without a checkout; a name that ends in a slash has files below it
NEEDED = (
    "sd3_light/py.typed",
    "sd3_light/recipes/lora.toml",
    "sd3_light/recipes/demo/pretrain.toml",
    "sd3_light/assets/demo/model_index.json",
    "sd3_light/assets/demo/transformer/",
    "sd3_light/pages/templates/",
    "sd3_light/pages/styles/",
    "sd3_light/pages/scripts/",
)
# of the LoRA's run
SHORT_RUN = ("max_steps=2", "warmup_steps=0", "checkpoint_every_n_steps=1", "save_every_n_steps=2")
STEP_SECONDS = 1800
SERVER_SECONDS = 120


class StepError(Exception):
    """A step failed: what it printed."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and the folder in which its commands run."""

    venv: Path
    work: Path

    @property
    def python(self) -> str:
        return str(self.venv / "bin" / "python")

    @property
    def command(self) -> str:
        return str(self.venv / "bin" / "sd3-light")

    def variables(self) -> dict[str, str]:
        """Return the environment variables of its commands: no other Python code is on the path."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return kept | {"PATH": f"{self.venv / 'bin'}:{os.environ['PATH']}", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(self, *command: str) -> str:
        """Run a command and return what it printed; raises `StepError` if it fails."""
        return run(command, self.work, self.variables())


def run(command: Sequence[str], folder: Path, variables: dict[str, str] | None = None) -> str:
    """Run a command in a folder and return what it printed; raises `StepError` if it fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_SECONDS,
        )
    except FileNotFoundError as error:
        raise StepError(f"{command[0]} does not exist") from error
    except subprocess.TimeoutExpired as error:
        raise StepError(f"{' '.join(command)}: no end after {STEP_SECONDS} s") from error
    if done.returncode != 0:
        raise StepError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


@contextmanager
def step(name: str) -> Iterator[None]:
    """Print the name of a step and the seconds that it took."""
    started = time.monotonic()
    try:
        yield
    except StepError as error:
        output = " | ".join(line.strip() for line in str(error).splitlines() if line.strip())
        sys.exit(f"error: {name}, after {time.monotonic() - started:.0f} s: {output[-4000:]}")
    print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)


def lower_bounds(requirements: Sequence[str]) -> list[str]:
    """Return constraints that pin every requirement to its lowest version."""
    pins = []
    for requirement in requirements:
        bound = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*(?:>=|==)\s*([\w.]+)", requirement)
        if bound is None:
            raise ValueError(f"{requirement}: no lower bound")
        pins.append(f"{bound[1]}=={bound[2]}")
    return pins


def constraints_of(dependencies: str, has_torch: bool) -> list[str]:
    """Return the constraints of a set of dependencies, without torch if the caller names its release."""
    if dependencies == "newest":
        return []
    if dependencies == "pinned":
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    else:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lines = lower_bounds([*project["dependencies"], *project["optional-dependencies"]["ui"]])
    return [line for line in lines if not (has_torch and line.startswith("torch=="))]


def build(out: Path) -> tuple[Path, Path]:
    """Build both files from what git tracks, and return the sdist and the wheel."""
    source = out / "source"
    tracked = run(("git", "ls-files", "-z"), ROOT).split("\0")
    for name in filter(None, tracked):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    run((sys.executable, "-m", "build", "--outdir", str(out / "dist"), str(source)), out)
    (sdist,) = (out / "dist").glob("*.tar.gz")
    (wheel,) = (out / "dist").glob("*.whl")
    run((sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)), out)
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> str:
    """Compare the files of the wheel with those it needs; returns a line with their sizes."""
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    missing = [name for name in NEEDED if not any(one == name or (name[-1] == "/" and name in one) for one in sizes)]
    tracked = run(("git", "ls-files", "sd3_light"), ROOT).splitlines()
    missing += [name for name in tracked if name not in sizes and not name.endswith(".md")]
    if missing:
        raise StepError(f"the wheel lacks {', '.join(missing)}")
    metadata = f"sd3_light-{wheel.name.split('-')[1]}.dist-info/"
    foreign = [name for name in sizes if not name.startswith(("sd3_light/", metadata))]
    if foreign:
        raise StepError(f"the wheel has files of the checkout: {', '.join(foreign)}")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    if not {"pyproject.toml", "LICENSE", "README.md", "sd3_light/__init__.py"} <= set(names):
        raise StepError("the sdist cannot be built: pyproject.toml, LICENSE, README.md or the package is missing")
    weights = sum(size for name, size in sizes.items() if name.startswith("sd3_light/assets/demo/"))
    files = f"{wheel.name} {wheel.stat().st_size / 2**20:.1f} MiB, {sdist.name} {sdist.stat().st_size / 2**20:.1f} MiB"
    return f"{files}; the demo's weights take {weights / 2**20:.1f} MiB of the installed package"


def install(wheel: Path, environment: Environment, python: str, dependencies: str, torch: str | None) -> str:
    """Make the environment, install the wheel with the extra `ui`, and return the versions of the main libraries."""
    run((python, "-m", "venv", str(environment.venv)), environment.work)
    constraints = environment.work / "constraints.txt"
    lines = constraints_of(dependencies, has_torch=torch is not None)
    constraints.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    package = f"sd3-light[ui] @ {wheel.as_uri()}"
    requirements = [package] if torch is None else [torch, package]
    pip = (environment.python, "-m", "pip")
    environment.run(*pip, "install", "--quiet", "--constraint", str(constraints), *requirements)
    environment.run(*pip, "check")
    names = ("torch", "diffusers", "transformers", "accelerate", "peft", "numpy", "pillow", "pydantic")
    return environment.run(
        environment.python,
        "-c",
        f"from importlib.metadata import version; print(', '.join(f'{{n}} {{version(n)}}' for n in {names}))",
    ).strip()


def check_command(environment: Environment) -> None:
    """Compare the version that the command prints with that of the sources; the code is that of the environment."""
    versions = re.findall(r'__version__ = "(.+)"', (ROOT / "sd3_light" / "__init__.py").read_text(encoding="utf-8"))
    printed = environment.run(environment.command, "--version")
    if versions[0] not in printed:
        raise StepError(f"--version printed {printed!r}, not {versions[0]}")
    place = environment.run(environment.python, "-c", "import sd3_light; print(sd3_light.__file__)").strip()
    if not Path(place).is_relative_to(environment.venv):
        raise StepError(f"the package is imported from {place}, not from the environment")


def run_demo(environment: Environment) -> None:
    """Run a short demo; it draws its images, trains, exports and scores."""
    counts = ("--steps", "2", "--more-steps", "2", "--images", "24", "--prompts", "4")
    environment.run(environment.command, "demo", *counts)
    if not (environment.work / "demo_run" / "grid.png").is_file():
        raise StepError("the demo wrote no demo_run/grid.png")


def run_lora(environment: Environment) -> None:
    """Train a LoRA on the demo's images and model, with the commands that `new` prints, and draw with it."""
    data = str(environment.work / "demo_run" / "data" / "train")
    model = str(environment.work / "demo_run" / "model")
    config = "lora/lora.toml"
    keys = [word for key in SHORT_RUN for word in ("--set", key)]
    environment.run(environment.command, "new", "lora", "--data", data, "--model", model, "--out", "lora")
    environment.run(environment.command, "check", config, *keys)
    environment.run(environment.command, "cache", config, *keys)
    trained = environment.run(environment.command, "train", config, *keys)
    if "verified with stock diffusers" not in trained:
        raise StepError(f"the export was not verified:\n{trained}")
    environment.run(environment.command, "export", "lora/runs/lora", "lora/exported")
    if not (environment.work / "lora" / "exported" / "pytorch_lora_weights.safetensors").is_file():
        raise StepError("export wrote no lora/exported/pytorch_lora_weights.safetensors")
    environment.run(environment.command, "sample", "lora/runs/lora", "a red circle", "--steps", "2", "--out", "drawn")
    if not list((environment.work / "drawn").glob("*.png")):
        raise StepError("sample wrote no image")


def serve_page(environment: Environment) -> None:
    """Start the server, read its first page and stop it as Ctrl-C does."""
    printed = environment.work / "ui.txt"
    with printed.open("wb") as output:
        server = subprocess.Popen(
            (environment.command, "ui", "demo_run", "--port", "0"),
            cwd=environment.work,
            env=environment.variables() | {"XDG_STATE_HOME": str(environment.work / "state")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            page = _page_of(server, printed)
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(SERVER_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                raise StepError(f"the server runs {SERVER_SECONDS} s after Ctrl-C") from None
    if "<title>Runs</title>" not in page or 'href="/runs/pretrain-' not in page:
        raise StepError(f"the page names no run:\n{page[:1000]}")


def _page_of(server: subprocess.Popen[bytes], printed: Path) -> str:
    """Wait for the address that the server prints, and return its page."""
    last = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < last:
        text = printed.read_text(encoding="utf-8")
        if address := re.search(r"open (http://\S+)", text):
            with urllib.request.urlopen(address[1], timeout=SERVER_SECONDS) as response:
                body: bytes = response.read()
            return body.decode()
        if server.poll() is not None:
            raise StepError(f"the server ended with exit code {server.returncode}:\n{text}")
        time.sleep(0.2)
    raise StepError(f"no address after {SERVER_SECONDS} s:\n{printed.read_text(encoding='utf-8')}")


def parser() -> argparse.ArgumentParser:
    """Return the command line of the script."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    options.add_argument("--python", default=sys.executable, help="Python of the new environment (default: this one)")
    options.add_argument("--dependencies", choices=DEPENDENCY_SETS, default="pinned", help="versions to install")
    options.add_argument("--torch", help="requirement of torch, such as torch==2.13.0, instead of that of the set")
    options.add_argument("--dist", type=Path, help="copy the sdist and the wheel into this folder")
    return options


def main() -> int:
    """Run every step; returns the exit status."""
    arguments = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="sd3-light-package-") as folder:
        out = Path(folder).resolve()
        environment = Environment(out / "venv", out / "work")
        environment.work.mkdir()
        with step("build and twine check"):
            sdist, wheel = build(out)
        with step("contents"):
            print(check_contents(sdist, wheel))
        with step(f"install, {arguments.dependencies} dependencies"):
            print(install(wheel, environment, arguments.python, arguments.dependencies, arguments.torch))
        with step("sd3-light --version"):
            check_command(environment)
        with step("demo"):
            run_demo(environment)
        with step("LoRA: new, check, cache, train, export, sample"):
            run_lora(environment)
        with step("ui"):
            serve_page(environment)
        if arguments.dist is not None:
            arguments.dist.mkdir(parents=True, exist_ok=True)
            shutil.copy(sdist, arguments.dist)
            shutil.copy(wheel, arguments.dist)
    print(f"the package works with {arguments.dependencies} dependencies")
    return 0


if __name__ == "__main__":
    sys.exit(main())
