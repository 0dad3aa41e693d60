"""`launch_data_process_task`: compute once what does not change during training, and store it for a second stage."""

import json
from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.engines.accelerate import launch_from_accelerator
from sd3_light.engines.errors import as_user_error, explain_runtime_errors
from sd3_light.files import write_atomically
from sd3_light.runlog import info, progress, set_main_process
from sd3_light.tasks.batches import ReadItem, any_item_of, item_of, length_of
from sd3_light.tasks.custom_forward import CustomForward, TaskModule, task_module
from sd3_light.tasks.logger import ModelLogger, require_logger
from sd3_light.tasks.module import DiffusionTrainingModule
from sd3_light.tasks.processed import (
    ProcessedSample,
    ProcessedWriter,
    SampleFileWriter,
    fingerprint,
    write_processed_manifest,
)
from sd3_light.tasks.recipe import recipe_of
from sd3_light.tasks.sample_files import has_tensor, storable
from sd3_light.tasks.train import aborting_on_error
from sd3_light.tasks.videos import VideoDataset


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

    Each process takes every n-th sample and works alone until the end. A sample whose data and units have not changed
    is not computed again, so the task may be interrupted and started again.
    `{output_path}/{process_index}/{data_id}.json` shows where each sample's tensors are.
    """
    bucket_of = bucket_of or getattr(dataset, "bucket_of", None)
    num_workers = _num_workers(num_workers, args)
    module, folder = task_module(model), require_logger(model_logger)
    for name, value, least in (("num_workers", num_workers, 0), ("shard_size", shard_size, 1)):
        if type(value) is not int or value < least:
            raise UserError(f"{name} is {value!r}; give an integer >= {least}")
    launch = Launch() if accelerator is None else launch_from_accelerator(accelerator)
    set_main_process(launch.is_main)
    count = length_of(dataset)
    if accelerator is not None:
        module.to(accelerator.device)
    recipe = recipe_of(module)
    is_custom = isinstance(module, CustomForward)
    with as_user_error(f"output_path {folder}", "choose another"):
        writer = (SampleFileWriter if is_custom else ProcessedWriter)(folder, launch.rank, shard_size)
    indices = list(range(launch.rank, count, launch.world))
    items = _items(dataset, indices, num_workers, any_item_of if is_custom else item_of)
    autocast = nullcontext if accelerator is None else accelerator.autocast  # as in a training step
    reused = 0
    fixed = nullcontext() if isinstance(module, CustomForward) else module.fixed_units()
    with fixed, progress("process", len(indices), "samples") as bar:
        for done, (index, item) in enumerate(zip(indices, items, strict=True), start=1):
            made_from = fingerprint({"recipe": recipe["digest"], "data": item})
            if writer.known.get(index) == made_from:
                reused += 1
            else:
                with autocast():
                    values = _stored_by(module, item, index)
                writer.add(ProcessedSample(index, _bucket(bucket_of, index), made_from, values))
            bar.set_done(done, len(indices))
    writer.close()
    if accelerator is not None:
        accelerator.wait_for_everyone()
    if launch.is_main:
        write_processed_manifest(folder, recipe, count)
        _write_rejects(dataset, folder)
        info(f"processed data: {count} samples in {folder} ({reused} of this process were up to date)")
    if accelerator is not None:
        accelerator.wait_for_everyone()
    return folder


def _num_workers(argument: int, args: Any) -> int:
    """Return the number of workers; attributes of ``args`` override the argument."""
    given = [getattr(args, name, None) for name in ("dataset_num_workers", "num_workers")]
    return next((value for value in given if value is not None), argument)


def _bucket(bucket_of: Callable[[int], Hashable] | None, index: int) -> str:
    with as_user_error(f"bucket_of({index})", "return a name or number for every index"):
        return "all" if bucket_of is None else str(bucket_of(index))


def _write_rejects(dataset: Dataset[Any], folder: Path) -> None:
    """Write the rejected videos beside the processed data."""
    if isinstance(dataset, VideoDataset):
        lines = [json.dumps(reject, ensure_ascii=False) + "\n" for reject in dataset.rejects_as_json()]
        write_atomically(folder / "rejects.jsonl", "".join(lines).encode())


def _items(dataset: Dataset[Any], indices: list[int], num_workers: int, read: ReadItem) -> Iterator[Any]:
    """Yield the items in order, prefetched by worker processes."""
    items = _Items(dataset, read)
    loader = DataLoader(
        items,
        batch_size=None,
        sampler=indices,
        num_workers=num_workers,
        collate_fn=_unchanged,
        multiprocessing_context="fork" if num_workers else None,  # other workers import from the working directory
    )
    for item in loader:
        if isinstance(item, UserError):
            raise item
        yield item


class _Items(Dataset[Any]):
    """Items by index. An error is returned as a value: torch would wrap what a worker raises in its traceback."""

    def __init__(self, dataset: Dataset[Any], read: ReadItem) -> None:
        self.dataset, self.read = dataset, read

    def __getitem__(self, index: int) -> Any:
        try:
            return self.read(self.dataset, index)
        except UserError as error:
            return error


def _unchanged(item: Any) -> Any:
    return item


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _stored_by(module: TaskModule, item: Any, index: int) -> Any:
    """Return what the second stage needs of an item, in a form that can be stored."""
    if isinstance(module, DiffusionTrainingModule):
        return _named_values(module.process(item, index), index)
    returned = module.process(item, index)
    if isinstance(returned, Tensor) and returned.numel() == 1:
        raise UserError(
            f"forward of {module.name} returned a loss in the data process; return there what the second stage needs "
            "(DiffSynth's modules do so with a task that ends in ':data_process')"
        )
    values = storable(returned, f"sample {index}: what forward of {module.name} returned")
    if not has_tensor(values):
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
