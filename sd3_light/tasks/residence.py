"""Where the shards of processed data are during a task: `cache_residence`, as in a train TOML."""

from collections.abc import Callable

import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.core.batch import Batch
from sd3_light.data.loader import PipelineDataLoader
from sd3_light.engines.feed import load_cache, loader_options
from sd3_light.engines.prefetch import Finish, pin_host_memory, prefetch_steps
from sd3_light.engines.processes import ProcessGroups
from sd3_light.engines.protocol import StepStream
from sd3_light.flow.noise import DeviceNoise
from sd3_light.model.device_copy import to_device
from sd3_light.tasks.batches import ReadItem, TaskBatches
from sd3_light.tasks.call import TaskCall
from sd3_light.tasks.cost import TaskCost, cost_of
from sd3_light.tasks.prepare import WORDS, SamplePreparer, sample_ids
from sd3_light.tasks.processed import ProcessedDataset
from sd3_light.train.residence import TrainingProcess, place_cache


def require_shards(task: TaskCall) -> None:
    """Raise if a setting is about shards that the dataset does not have."""
    data = task.dataset
    settings = task.settings
    if settings.shuffle_window is not None and not hasattr(data, "segment_of"):
        raise UserError("shuffle_window is a number of shards of a ProcessedDataset; leave it out for other datasets")
    if settings.cache_residence not in ("host", "device"):
        return
    if getattr(data, "shards", None) is None:
        raise UserError(
            f'cache_residence="{settings.cache_residence}" is about the shards of a ProcessedDataset; leave it out for '
            "other datasets"
        )
    if settings.cache_residence == "device" and not isinstance(task.model.preparer(), SamplePreparer):
        raise UserError('cache_residence="device" needs a module with denoise; use "host" for a custom forward')


def cost_beside_shards(task: TaskCall) -> TaskCost | None:
    """Return the cost of the module if the memory that it leaves decides where the shards are; before an engine has it.

    On a CPU they are streamed, as in a train TOML: reading is faster than the model.
    """
    shards = getattr(task.dataset, "shards", None)
    if shards is None or task.config.residence != "auto" or task.device.type != "cuda":
        return None
    return cost_of(task)


def place_shards(task: TaskCall, groups: ProcessGroups, cost: TaskCost | None) -> None:
    """Read the shards of processed data into memory, as the settings say, or as fits beside what is on the GPU."""
    data = task.dataset
    config = task.config
    if not isinstance(data, ProcessedDataset) or data.shards is None:
        return
    if config.residence != "auto":
        data.resident = load_cache(data.shards, config, task.launch, task.device)
    elif cost is not None and cost.why_not_counted is None:
        process = TrainingProcess(task.launch, task.device, groups, task.settings.engine == "deepspeed")
        data.resident = place_cache(data.shards, task.samples.order, config, cost, process)


def training_steps(task: TaskCall) -> Callable[[int], StepStream]:
    """Return a function that yields the micro-batches of endless steps, starting at a position.

    Workers read and prepare them. Stacked ones are copied to a GPU while it computes earlier ones, unless the shards
    are there already.
    """
    device = task.device
    micro = task.micro_batches
    preparer = task.model.preparer(device.type == "cuda" and not task.settings.num_workers)
    resident = getattr(task.dataset, "resident", None)
    read: ReadItem | None = task.read
    finish = None
    if resident is not None and resident.device.type == "cuda":
        assert isinstance(preparer, SamplePreparer), "`require_shards` raises"
        read = None
        finish = add_resident(preparer, task.dataset, device)
    batches = TaskBatches(task.dataset, task.samples, task.launch, micro, read)
    to_gpu = device.type == "cuda" and isinstance(preparer, SamplePreparer)
    options = loader_options(task.config, preparer)

    def steps(first: int) -> StepStream:
        items = range(first * micro, 2**62)
        pin = pin_host_memory if to_gpu else None
        loader = PipelineDataLoader(batches, None, micro, preparer, items=items, pin=pin, **options)
        return prefetch_steps(iter(loader), micro, device, finish) if to_gpu else loader.steps()

    return steps


def add_resident(preparer: SamplePreparer, dataset: ProcessedDataset, device: torch.device) -> Finish:
    """Return a function that adds to a batch the values of its samples on the device, and the noise."""
    noise = DeviceNoise(preparer.seed, device)

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def add(batch: Batch) -> Batch:
        items = [dataset[number] for number in sample_ids(batch)]
        batch = preparer.stacked(batch, items, allocate, device.type)
        clean = batch.get(preparer.latents)
        if clean is None or not clean.is_floating_point():
            return batch
        words = to_device(torch.from_numpy(batch.host[WORDS]), device)
        return batch.with_values({"noise": noise.normals("noise", words, tuple(clean.shape[1:]))})

    return add
