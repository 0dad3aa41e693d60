"""Runs of one project under many layouts, several per launch, for the tests of engines and checkpoints.

As a program, started by torchrun or plain python, it runs a list of jobs: one training run each.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.flow.objective import flow_loss

ROOT = Path(__file__).parents[2]
BATCH = 8


@dataclass(frozen=True)
class Layout:
    """An engine on some processes; every layout has global batches of 8."""

    name: str
    world_size: int = 1
    deepspeed: bool = False
    parallel: str = "ddp"
    stages: int = 1
    zero: int = 1
    accumulation: int = 1

    @property
    def keys(self) -> list[str]:
        """Overrides of the train config."""
        replicas = self.world_size // self.stages
        return [
            f'parallel="{self.parallel}"',
            f"pipeline_stages={self.stages}",
            f"zero_stage={self.zero}",
            f"gradient_accumulation_steps={self.accumulation}",
            f"micro_batch_size_per_gpu={BATCH // replicas // self.accumulation}",
        ]

    @property
    def engine(self) -> str:
        """The engine's name in a run's log."""
        if self.deepspeed:
            return f"deepspeed pp{self.stages} dp{self.world_size // self.stages} zero{self.zero}"
        return f"torch {self.parallel}" if self.world_size > 1 else "torch"

    def accumulating(self, micro_batches: int) -> "Layout":
        """Return the layout with another number of micro-batches."""
        return replace(self, accumulation=micro_batches)


# fmt: off
ONE     = Layout("one")
DDP     = Layout("ddp",     2)
FSDP2   = Layout("fsdp2",   2, parallel="fsdp2", accumulation=2)
DS_ONE  = Layout("ds-one",  1, deepspeed=True)
ZERO0   = Layout("zero0",   2, deepspeed=True, zero=0, accumulation=4)
ZERO1   = Layout("zero1",   2, deepspeed=True, accumulation=4)
PIPE    = Layout("pipe",    2, deepspeed=True, stages=2, accumulation=4)
ZERO2   = Layout("zero2",   2, deepspeed=True, zero=2, accumulation=2)
ZERO3   = Layout("zero3",   2, deepspeed=True, zero=3, accumulation=2)
PIPES   = Layout("pipes",   4, deepspeed=True, stages=2, accumulation=4)
PIPE4   = Layout("pipe4",   4, deepspeed=True, stages=4, accumulation=4)
# fmt: on
ALL_LAYOUTS = (ONE, DDP, FSDP2, DS_ONE, ZERO0, ZERO1, PIPE, ZERO2, ZERO3, PIPES)

WITHOUT_DEEPSPEED = "SD3_LIGHT_TEST_WITHOUT_DEEPSPEED"
"""If this variable is set, the layout tests run as if DeepSpeed were not installed."""

HAS_DEEPSPEED = find_spec("deepspeed") is not None and not os.environ.get(WITHOUT_DEEPSPEED)
LAYOUTS = tuple(layout for layout in ALL_LAYOUTS if HAS_DEEPSPEED or not layout.deepspeed)


@dataclass(frozen=True)
class Job:
    """A run of a project's train config in its own folder, from the start or from a checkpoint.

    With ``objective`` it trains for `tests.distributed.objective`. ``poisoned`` spoils steps: "latents" are NaN, so
    gradients are too; an infinite "loss" has finite gradients.
    """

    toml: str
    run: str
    layout: Layout
    keys: tuple[str, ...] = ()
    checkpoint: str | None = None
    objective: bool = False
    poisoned: dict[int, str] = field(default_factory=dict)

    @property
    def overrides(self) -> list[str]:
        """All overrides of the job."""
        return [f'output_dir="{self.run}"', *self.layout.keys, *self.keys]


def launch(jobs: Sequence[Job], folder: Path, timeout: int = 1500) -> None:
    """Launch jobs of one world size together, with torchrun, or with plain python for a single process."""
    (world,) = {job.layout.world_size for job in jobs}
    folder.mkdir(parents=True, exist_ok=True)
    job_list = folder / f"jobs-{world}.json"
    job_list.write_text(json.dumps([asdict(job) for job in jobs]), encoding="utf-8")
    run_ranks(world, Path(__file__).resolve(), job_list, timeout=timeout)


def run_ranks(world: int, *command: object, timeout: int = 240) -> "subprocess.CompletedProcess[str]":
    """Run a program on the CPU in some processes of torchrun, or one of plain python; it must succeed.

    Without CUDA, also where there is a GPU: NCCL does not let processes share one.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    whole = [sys.executable, *(torchrun if world > 1 else []), *map(str, command)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(whole, env=environment, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, done.stderr[-8000:]
    return done


Runs = Mapping[str, tuple[Layout, tuple[str, ...], str | None]]
"""Name of a run -> its layout, its overrides, and the run whose checkpoint it resumes."""


def launch_runs(project: Any, runs: Runs, step: int, folder: Path) -> None:
    """Launch runs of one process, then those of two; ``step`` is that of the checkpoints to resume."""
    for world in (1, 2):
        jobs = []
        for name, (layout, keys, source) in runs.items():
            checkpoint = None if source is None else str(saved(project, source, step))
            if layout.world_size == world:
                jobs.append(Job(str(project.train_toml), name, layout, keys, checkpoint))
        launch(jobs, folder)


def saved(project: Any, run: str, step: int) -> Path:
    """Return the checkpoint of a step of a run."""
    return Path(project.folder / run / "checkpoints" / checkpoint_name(step))


def same_steps(project: Any, run: str, reference: str, first: int, last: int) -> None:
    """Compare the steps of a run after ``first`` and its last checkpoint with those of another run."""
    expected = {event["step"]: event for event in project.events("step", reference)}
    steps = project.events("step", run)
    assert [event["step"] for event in steps] == list(range(first + 1, last + 1))
    for event in steps:
        for name in ("loss", "grad_norm", "param_norm"):
            assert event[name] == pytest.approx(expected[event["step"]][name], rel=1e-4), (name, event["step"])
    ours, theirs = (open_checkpoint(saved(project, name, last)) for name in (run, reference))
    assert set(ours.shapes) == set(theirs.shapes)
    for name in list(theirs.shapes)[:20]:
        torch.testing.assert_close(ours.tensor(name), theirs.tensor(name), rtol=1e-3, atol=1e-4)


def train_here(job: Job) -> None:
    """Run the job in this process; the proof of exports is left to other tests."""
    from sd3_light.config import load_config
    from sd3_light.engines import Launch
    from sd3_light.train import verb as train
    from tests.distributed.objective import whole_objective

    resume = None if job.checkpoint is None else train.Resume(Path(job.checkpoint))
    POISON[:] = [job.poisoned.get(step, "") for step in range(1, max(job.poisoned, default=0) + 1)]
    objective = whole_objective if job.objective else None
    loaded = load_config(Path(job.toml), job.overrides)
    train.run(loaded, Launch.detect(), resume, job.layout.deepspeed, objective=objective)


POISON: list[str] = []
"""How the next steps are spoiled; "": not."""


def poison(batches: Sequence[Any]) -> Sequence[Any]:
    """Return the micro-batches of a step, or a copy with non-finite losses."""
    kind = POISON.pop(0) if POISON else ""
    if kind == "latents":
        return [batch.with_values({"noisy": batch["noisy"] * float("nan")}) for batch in batches]
    if kind == "loss":  # see `marked_loss`
        return [batch.with_values({"target": torch.full_like(batch["target"], torch.inf)}) for batch in batches]
    return batches


def marked_loss(predicted: torch.Tensor, target: torch.Tensor, *more: Any) -> torch.Tensor:
    """Return the losses; those of samples with an infinite target are infinite, with finite gradients."""
    marked = torch.isinf(target)
    losses = flow_loss(predicted, target.masked_fill(marked, 0), *more)
    return losses + torch.where(marked.flatten(1).any(1), torch.inf, 0.0)


def patch() -> None:
    """Patch training: skip the proofs of exports, inject bad batches, compare loaded state with its checkpoint bit for
    bit, and record the memory held at the end."""
    from sd3_light.checkpoint.progress import track_kind
    from sd3_light.data.loader import PipelineDataLoader
    from sd3_light.export import adapter_folder, diffusers_folder
    from sd3_light.flow import objectives
    from sd3_light.train import verb as train

    steps = PipelineDataLoader.steps
    PipelineDataLoader.steps = lambda self: (poison(step) for step in steps(self))  # type: ignore
    objectives.flow_loss = marked_loss
    diffusers_folder.prove = lambda *_: {}  # type: ignore[assignment]
    adapter_folder.prove_adapter = lambda *_: {}  # type: ignore[assignment]
    load = train.load_checkpoint

    def load_and_check(saved: Any, engine: Any, averages: Any, *more: Any) -> Any:
        restored = load(saved, engine, averages, *more)
        tracks = (engine.like_weights(track_kind(n), t.shadow) for n, t in averages.tracks.items())
        for piece in chain(engine.pieces(), chain.from_iterable(tracks)):
            expected = saved.tensor(piece.name).view(-1)[piece.start : piece.start + len(piece.values)]
            assert torch.equal(piece.values.cpu(), expected), f"{piece.name} differs from the checkpoint"
        return restored

    train.load_checkpoint = load_and_check
    finish = train.Driver.finish

    def record_and_finish(driver: Any, start: Any) -> None:
        record_memory(driver.folder, driver.run.engine, driver.run.averages)
        finish(driver, start)

    train.Driver.finish = record_and_finish  # type: ignore[method-assign]


def record_memory(run: Path, engine: Any, averages: Any) -> None:
    """Record the bytes of this process's weights, optimizer state and averages in the run's folder."""
    states = (each.optimizer.state.values() for each in engine.optimizer._optimizers)
    state = [value for values in chain.from_iterable(states) for value in values.values()]
    sizes = {
        "weights": storage_bytes(engine.weights.values()),
        "moments": storage_bytes(value for value in state if torch.is_tensor(value) and value.dim()),
        "averages": storage_bytes(tensor for track in averages.tracks.values() for tensor in track.shadow.values()),
    }
    (run / f"held-{engine.rank}.json").write_text(json.dumps(sizes), encoding="utf-8")


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    storages = [tensor.untyped_storage() for tensor in local]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def main(job_list: Path) -> None:
    """Run all jobs one after another in the same processes."""
    from sd3_light.engines import Launch
    from sd3_light.runlog.console import set_main_process

    set_main_process(Launch.detect().is_main)
    patch()
    for table in json.loads(job_list.read_text(encoding="utf-8")):
        table["poisoned"] = {int(step): kind for step, kind in table["poisoned"].items()}
        train_here(Job(**{**table, "layout": Layout(**table["layout"]), "keys": tuple(table["keys"])}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
