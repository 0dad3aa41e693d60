"""`launch_data_process_task`: compute once what does not change during training, and store it for a second stage."""

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset

from sd3_light.config.faults import UserError
from sd3_light.data.loader import PipelineDataLoader
from sd3_light.data.manifest import SHARDS
from sd3_light.data.slots import tensors_in
from sd3_light.engines import Launch
from sd3_light.engines.accelerate import launch_from_accelerator
from sd3_light.engines.errors import as_user_error, explain_runtime_errors
from sd3_light.files import write_atomically
from sd3_light.inputs import read_json_file
from sd3_light.runlog import info, progress, set_main_process
from sd3_light.sources.catalogue import rotate_to_share
from sd3_light.sources.claims import Claims
from sd3_light.tasks.batches import ReadItem, any_item_of, item_of, length_of
from sd3_light.tasks.datasets import SourceDataset
from sd3_light.tasks.identity import identity_of
from sd3_light.tasks.logger import ModelLogger, require_logger
from sd3_light.tasks.models import CustomForward, UnitModel, task_model
from sd3_light.tasks.processed import (
    ProcessedSample,
    StoredRows,
    fingerprint,
    read_notes,
    write_file_manifest,
    write_sample,
    write_samples,
    write_shard_manifest,
)
from sd3_light.tasks.sample_files import storable
from sd3_light.tasks.sides import sides_of
from sd3_light.tasks.train import aborting_on_error


@aborting_on_error()
@explain_runtime_errors()
def launch_data_process_task(
    accelerator: Accelerator | None,
    dataset: Dataset[Any],
    model: nn.Module,
    model_logger: ModelLogger,
    num_workers: int = 8,
    args: Any = None,
    bucket_of: Callable[[int], Hashable] | None = None,
    shard_size: int = 256,
) -> Path:
    """Run the cached units of ``model`` on every sample and store the results; return their folder.

    Cached units need no gradient and draw nothing. What the other units read is stored in ``model_logger.output_path``:
    train on ``ProcessedDataset(folder)``. Of a model with a custom forward, what ``model(data)`` returns is stored, in
    `{output_path}/{process_index}/{data_id}.pth`; the second stage calls ``model({}, inputs=stored)``.

    Processes divide the samples of a bucket in shards of ``shard_size``, of the format of caches; files of a custom
    forward are every n-th sample's. A sample whose data and units have not changed is not computed again, so the task
    may be interrupted and started again.
    """
    num_workers = _num_workers(num_workers, args)
    module = task_model(model)
    folder = require_logger(model_logger)
    for name, value, least in (("num_workers", num_workers, 0), ("shard_size", shard_size, 1)):
        if type(value) is not int or value < least:
            raise UserError(f"{name} is {value!r}; give an integer >= {least}")
    launch = Launch() if accelerator is None else launch_from_accelerator(accelerator)
    set_main_process(launch.is_main)
    count = length_of(dataset)
    if accelerator is not None:
        module.to(accelerator.device)
    with as_user_error(f"output_path {folder}", "choose another"):
        (folder / SHARDS).mkdir(parents=True, exist_ok=True)
    bucket_of = bucket_of or getattr(dataset, "bucket_of", None)
    job = _Job(dataset, module, identity_of(module), folder, launch, bucket_of, num_workers)
    autocast = nullcontext if accelerator is None else accelerator.autocast  # as in a training step
    with autocast():
        reused = _write_files(job) if isinstance(module, CustomForward) else _build_shards(job, module, shard_size)
    if accelerator is not None:
        accelerator.wait_for_everyone()
    if launch.is_main:
        if isinstance(module, CustomForward):
            write_file_manifest(folder, job.identity, count, sides_of(dataset))
        if isinstance(dataset, SourceDataset):
            dataset.write_rejects(folder)
        info(f"processed data: {count} samples in {folder} ({reused} of this process were up to date)")
    if accelerator is not None:
        accelerator.wait_for_everyone()
    return folder


@dataclass(frozen=True)
class _Job:
    """A data process: what is processed, by which module and into which folder."""

    dataset: Dataset[Any]
    module: UnitModel | CustomForward
    identity: dict[str, Any]
    folder: Path
    launch: Launch
    bucket_of: Callable[[int], Hashable] | None
    num_workers: int

    def bucket(self, index: int) -> str:
        """Return the bucket of a sample."""
        with as_user_error(f"bucket_of({index})", "return a name or number for every index"):
            return "all" if self.bucket_of is None else str(self.bucket_of(index))

    def items(self, indices: list[int]) -> Iterator[tuple[int, Any, str]]:
        """Yield index, item and fingerprint of samples, prefetched by worker processes."""
        read = any_item_of if isinstance(self.module, CustomForward) else item_of
        items = _Items(self.dataset, read)
        loader = PipelineDataLoader(items, None, 1, items, self.num_workers, 2, indices)
        for index, item in zip(indices, loader, strict=True):
            yield index, item, fingerprint({"recipe": self.identity["digest"], "data": item})


def _write_files(job: _Job) -> int:
    """Write a file per sample, every n-th in this process; return how many were up to date."""
    known = read_notes(job.folder)
    indices = list(range(job.launch.rank, length_of(job.dataset), job.launch.world_size))
    reused = 0
    with progress("process", len(indices), "samples") as bar:
        for index, item, made_from in job.items(indices):
            if index in known and known[index]["fingerprint"] == made_from:
                reused += 1
            else:
                values = _stored_by(job.module, item, index)
                write_sample(job.folder, job.launch.rank, ProcessedSample(index, job.bucket(index), made_from, values))
            bar.advance()
    return reused


def _build_shards(job: _Job, model: UnitModel, shard_size: int) -> int:
    """Build the shards that no other process builds, and wait for the others; return how many samples were stored.

    A process takes one group at a time: a bucket's next ``shard_size`` samples. The note of a group names its shards.
    """
    buckets: dict[str, list[int]] = {}
    for index in range(length_of(job.dataset)):
        buckets.setdefault(job.bucket(index), []).append(index)
    groups = {
        f"unit-{indices[start]:08d}": indices[start : start + shard_size]
        for indices in buckets.values()
        for start in range(0, len(indices), shard_size)
    }
    reused = 0
    stored = StoredRows(job.folder)
    with (
        model.module.fixed_units(),
        Claims(job.folder / "claims") as claims,
        progress("process", length_of(job.dataset), "samples") as bar,
    ):

        def note(name: str) -> Path:
            return claims.folder / f"{name}.json"

        def build(name: str) -> None:
            nonlocal reused
            files, count = _build_group(job, groups[name], stored, model.module.pads)
            reused += count
            bar.advance(len(groups[name]))
            write_atomically(note(name), json.dumps(files).encode())

        names = rotate_to_share(list(groups), (job.launch.rank, job.launch.world_size))
        claims.divide(names, lambda name: claims.is_newer(note(name), name), build)
        if job.launch.is_main:
            files = [file for name in groups for file in read_json_file(note(name))]
            write_shard_manifest(job.folder, files, job.identity, length_of(job.dataset), sides_of(job.dataset))
    return reused


def _build_group(job: _Job, indices: list[int], stored: StoredRows, pads: Sequence[str]) -> tuple[list[str], int]:
    """Return the shards of a group's samples, and how many samples earlier runs have stored."""
    prints: dict[int, str] = {}
    computed: dict[int, ProcessedSample] = {}
    for index, item, made_from in job.items(indices):
        prints[index] = made_from
        if made_from not in stored:
            values = _stored_by(job.module, item, index)
            computed[index] = ProcessedSample(index, job.bucket(index), made_from, values)
    if not computed and (files := stored.shards_of(list(prints.items()))) is not None:
        return files, len(indices)
    layouts: dict[Hashable, list[ProcessedSample]] = {}
    for index, made_from in prints.items():
        sample = computed.get(index) or stored.sample(index, job.bucket(index), made_from)
        layouts.setdefault(sample.layout(pads), []).append(sample)
    written = [write_samples(job.folder, samples, pads).file for samples in layouts.values()]
    return written, len(indices) - len(computed)


def _num_workers(argument: int, args: Any) -> int:
    """Return the number of workers; attributes of ``args`` override the argument."""
    given = [getattr(args, name, None) for name in ("dataset_num_workers", "num_workers")]
    return next((value for value in given if value is not None), argument)


class _Items(Dataset[Any]):
    """Items by index, which a loader passes on as they are."""

    def __init__(self, dataset: Dataset[Any], read: ReadItem) -> None:
        self.dataset = dataset
        self.read = read

    def __getitem__(self, index: int) -> Any:
        return self.read(self.dataset, index)

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Any:
        """Return the item."""
        return batch


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _stored_by(module: UnitModel | CustomForward, item: Any, index: int) -> Any:
    """Return what the second stage needs of an item, in a form that can be stored."""
    if isinstance(module, UnitModel):
        return _named_values(module.module.process(item, index), index)
    returned = module.process(item, index)
    if isinstance(returned, Tensor) and returned.numel() == 1:
        raise UserError(
            f"forward of {module.name} returned a loss in the data process; return there what the second stage needs "
            "(DiffSynth's modules do so with a task that ends in ':data_process')"
        )
    values = storable(returned, f"sample {index}: what forward of {module.name} returned")
    if not tensors_in(values):
        raise UserError(f"sample {index}: forward of {module.name} returned no tensor to store; return its results")
    return values


def _named_values(values: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the values if all are tensors or JSON; anything else is an error that names it."""
    for name, value in values.items():
        if not isinstance(value, Tensor) and not _is_json(value):
            raise UserError(
                f"sample {index}: {name!r} is a {type(value).__name__}, which cannot be stored; turn it into a "
                "tensor in a unit that needs no gradient, or do not read it later"
            )
    return values
