"""The conclusion of a check: what trains, whether it fits, how long it takes, and how much disk it needs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sd3_light.check.estimate import RunEstimate
from sd3_light.check.training_time import Work
from sd3_light.config import EmaConfig, TrainConfig
from sd3_light.config.cross_checks import config_warnings
from sd3_light.core.caption_lengths import cut_prompts, short_captions
from sd3_light.core.registry import family_of
from sd3_light.cost.amount import format_bytes
from sd3_light.cost.disk_space import (
    CACHE_REMEDY,
    DOES_NOT_FIT,
    DTYPE_BYTES,
    RUN_REMEDY,
    RunSteps,
    compare_with_free,
    run_disk,
)
from sd3_light.cost.drawing_memory import drawing_bytes
from sd3_light.cost.host_memory import MEASURED_CORES, export_host, export_seconds
from sd3_light.cost.residence import FROM_HOST, LARGEST_SHARE, Room, choose_residence
from sd3_light.cost.throughput import measured_blocks
from sd3_light.cost.traffic import needed_bandwidth, sent_per_step
from sd3_light.data.manifest import MANIFEST
from sd3_light.data.prompt_lists import prompts_to_encode
from sd3_light.formats import duration, plural
from sd3_light.model.base_values import other_shift, unlearnt_steps, with_base_values
from sd3_light.model.folder import TRANSFORMER, count_weights
from sd3_light.optim.power_function import ramp_end, ramped_decay
from sd3_light.system import Gpu, available_memory

Line = tuple[str, str]
"""A label and a sentence."""
_SAMPLE_BYTES = {"float32": 4, "bfloat16": 2}  # of a weight, by --dtype


@dataclass(frozen=True)
class Target:
    """Where a run is checked for: a GPU of this machine or kind, GPUs elsewhere (``gpu`` None), or a CPU.

    ``elsewhere``: on another machine, so that the disk and memory of this one decide nothing. ``cpu_speed`` are the
    FLOP/s of `step_time.cpu_speed`.
    """

    gpu: Gpu | None = None
    on_cpu: bool = False
    elsewhere: bool = False
    cpu_speed: float | None = None


def conclude(train: TrainConfig, estimate: RunEstimate, target: Target) -> list[Line]:
    """Return the conclusion, one line per subject."""
    export = ("export", _export(train, estimate))
    sample = ("sample", _sample(train, estimate, target))
    return [*resources(train, estimate, target), export, sample, *_warnings(train, estimate)]


def resources(train: TrainConfig, estimate: RunEstimate, target: Target) -> list[Line]:
    """Return what trains and what it needs, one line per subject."""
    lines = [*_subject(estimate)]
    if target.on_cpu:
        lines.append(
            ("device", "CPU: no GPU is visible; --gpu-memory GIB or --processes N estimate a run on GPUs elsewhere")
        )
        lines.append(("time", work(train, estimate).time_on_cpu(target.cpu_speed)))
    else:
        lines.append(("GPU memory", _gpu_memory(estimate, target.gpu)))
        lines.append(("time", work(train, estimate).time_on(target.gpu)))
        if estimate.setup.world_size > 1:
            lines.append(("network", _network(train, estimate, target.gpu)))
    lines += [*_disk(train, estimate, target), ("host memory", _host_memory(estimate, target))]
    lines.append(("cache residence", _residence(estimate, target)))
    return [*lines, *_averages(train.ema, estimate.total_steps)]


def what_does_not_fit(conclusion: Sequence[Line]) -> list[str]:
    """Return the labels of the resources that the run exceeds."""
    return [label for label, text in conclusion if text.startswith(DOES_NOT_FIT)]


def first_line(estimate: RunEstimate, conclusion: Sequence[Line]) -> str:
    """Return the verdict, which leaves out whether it fits a GPU of unknown memory."""
    text = f"{estimate.path}: no faults"
    if what_does_not_fit(conclusion):
        return f"{text}, but the run does not fit"
    lines = dict(conclusion)
    is_known = "device" in lines or lines.get("GPU memory", "").startswith("fits")
    return f"{text} and the run fits" if is_known else text


def _subject(estimate: RunEstimate) -> Iterator[Line]:
    setup = estimate.setup
    data = estimate.data
    trained = "" if setup.adapter is None else f"an adapter of {sum(setup.adapter):,} parameters on "
    facts = "".join(f", {fact.summary}" for fact in estimate.facts if fact.summary)
    yield "trains", f"{trained}{estimate.start.sentence} ({setup.cost.parameters:,} parameters{facts})"
    batches = sorted({row.global_batch for row in data.rows})
    batch = f"{batches[0]:,}" if len(batches) == 1 else f"{batches[0]:,} to {batches[-1]:,}"
    epochs = estimate.total_steps / max(1, data.steps)
    images = f"{data.samples:,} images in {plural(len(data.rows), 'bucket')}"
    if estimate.drawing is None:
        yield "steps", f"{estimate.total_steps:,} of {batch} samples: {epochs:,.1f} epochs of {images}"
    else:
        yield "steps", f"{estimate.total_steps:,} of {batch} samples, which the run draws"
        yield "rewards", estimate.drawing
    if data.held_out:
        yield "validation", f"about {data.held_out:,} of {data.samples:,} images are held out and not trained on"


def _gpu_memory(estimate: RunEstimate, gpu: Gpu | None) -> str:
    needed = estimate.gpu.total
    if gpu is None or gpu.total_bytes is None:
        return f"{format_bytes(needed)} per GPU, estimated; --gpu-memory GIB says whether it fits"
    if needed <= gpu.total_bytes:
        return f"fits: {format_bytes(needed)} of the {format_bytes(gpu.total_bytes)} of {gpu.name}, estimated"
    setup = estimate.setup
    can_release = setup.adapter is None and setup.world_size == 1 and not setup.release
    release = " and gradient_release = true (docs/reference/training.md, section 5)" if can_release else ""
    last = "write swap_blocks = 'all'" if setup.adapter is not None else "shard with parallel = 'fsdp2'"
    if setup.adapter is None and setup.world_size == 1 and not setup.swapped:
        last = f"write swap_blocks = 'all'{' beside it' if can_release else ''}, or {last} on several GPUs"
    remedy = f"lower micro_batch_size_per_gpu, write activation_checkpointing = true{release}, or {last}"
    return f"{DOES_NOT_FIT}: {format_bytes(needed)}, {gpu.name} has {format_bytes(gpu.total_bytes)}; {remedy}"


def work(train: TrainConfig, estimate: RunEstimate) -> Work:
    """Return all steps of a run."""
    setup = estimate.setup
    return Work(
        estimate.run_flops.value,
        estimate.total_steps * setup.accumulation,
        measured_blocks(setup.block_kind, setup.adapter is not None, train.fp8),
        setup.cost.num_blocks,
        setup.world_size,
        setup.graphs,
        setup.cost.text.at_most,
    )


def _network(train: TrainConfig, estimate: RunEstimate, gpu: Gpu | None) -> str:
    sent = sent_per_step(estimate.setup).value
    text = f"each GPU sends {format_bytes(sent)} per step"
    seconds = None if gpu is None else work(train, estimate).seconds_on(gpu.name)
    if not seconds:
        return f"{text}; how fast the network must be depends on the time of a step, which is unknown"
    gigabits = needed_bandwidth(sent, seconds / estimate.total_steps) / 1e9
    return f"{text}: hidden behind computing from about {gigabits:.2g} Gbit/s per GPU on, estimated"


def _averages(ema: EmaConfig, steps: int) -> Iterator[Line]:
    """Say which decay each average with a ramp has at the last step."""
    own = (("EMA", ema.decay, ema.update_every),)
    others = ((f"EMA {track.name}", track.decay, track.update_every or ema.update_every) for track in ema.track)
    for name, decay, interval in (*own, *others) if ema.enable else ():
        if decay is None:
            continue
        if interval > steps:
            yield name, f"warning: it is never updated, as update_every = {interval:,} exceeds the {steps:,} steps"
            continue
        last = ramped_decay(steps, interval, decay)
        covered = f"the average covers about the last {min(steps, round(interval / (1 - last))):,} of {steps:,} steps"
        end = ramp_end(interval, decay)
        is_reached = 1 - last <= 1.01 * (1 - decay)
        missed = f"not {decay:g}, which the ramp reaches at step {end:,}"
        ramp = f"reached at step {min(end, steps):,}" if is_reached else missed
        yield name, f"decay {last:.4g} at the last step, {ramp}; {covered}"


def _warnings(train: TrainConfig, estimate: RunEstimate) -> Iterator[Line]:
    family = family_of(train.model)
    unguided = family.no_guidance(estimate.start)
    yield from (("warning", warning) for warning in config_warnings(train, estimate.total_steps, unguided))
    if other := other_shift(with_base_values(train.model)):
        yield "shift", other
    if sentence := unlearnt_steps(train):
        yield "warning", sentence
    yield from (("warning", leak.sentence()) for leak in estimate.leaks)
    limits = family.encoding.model_limits(train.model)
    yield from (("prompt", f"warning: {line}") for line in cut_prompts(prompts_to_encode(train), limits))
    side = max((min(row.resolution) for row in estimate.data.rows), default=0)
    if not train.model.continues_weights and (sentence := short_captions(estimate.data.captions, side)):
        yield "captions", f"warning: {sentence}"
    for data in (estimate.data, *estimate.evals):
        if data.cut is not None and (sentence := data.cut.sentence()):
            yield f"captions {data.name}", sentence
        if sentence := data.extremes.sentence():
            yield f"images {data.name}", sentence


# --- disk ---------------------------------------------------------------------------------------


def _disk(train: TrainConfig, estimate: RunEstimate, target: Target) -> Iterator[Line]:
    caches = [data for data in (estimate.data, *estimate.evals) if isinstance(data.cache_dir, Path)]
    missing = sum(data.cache.value for data in caches if not (Path(data.cache_dir) / MANIFEST).is_file())
    if missing:
        text = f"{estimate.setup.cost.text.at_most}{format_bytes(missing)}"
        yield "disk, cache", _fits(missing, Path(caches[0].cache_dir), text, target, CACHE_REMEDY)
    elif caches:
        yield "disk, cache", "the cache exists"
    total, text = run_space(train, estimate)
    yield "disk, run", _fits(total, train.output_dir, text, target, RUN_REMEDY)


def run_space(train: TrainConfig, estimate: RunEstimate) -> tuple[int, str]:
    """Return the most bytes that the run's checkpoints and exports take at a time, and a text with their numbers."""
    samples = max((row.global_batch for row in estimate.data.rows), default=1)
    return run_disk(train, estimate.setup, RunSteps(estimate.total_steps, estimate.data.steps, samples))


def _fits(needed: int, folder: Path, text: str, target: Target, remedy: str) -> str:
    return text if target.elsewhere else compare_with_free(needed, folder, text, remedy)


def _host_memory(estimate: RunEstimate, target: Target) -> str:
    needed = estimate.host.value
    free = available_memory()
    text = f"{format_bytes(needed)} per process, without interpreters"
    if free is None or estimate.setup.world_size > 1 or target.elsewhere:
        return text
    verdict = _verdict(needed, free)
    remedy = "" if verdict != DOES_NOT_FIT else "; write cache_residence = 'stream', or lower num_dataloader_workers"
    return f"{verdict}: {text}; {format_bytes(free)} are free{remedy}"


def _residence(estimate: RunEstimate, target: Target) -> str:
    """Say where the cache is during training, and where else it would fit: "host" or, on GPUs, "device"."""
    cache = estimate.data.cache.value
    free = available_memory()
    options = [f'"host" takes {format_bytes(cache)} of host memory per process']
    if free is not None and not target.elsewhere:
        options[0] += f" ({_verdict(cache, int(LARGEST_SHARE * free))}: {format_bytes(free)} are free)"
    if not target.on_cpu:
        total = estimate.gpu.total + (0 if estimate.residence == "device" else cache)
        text = f"{format_bytes(total)} in total"
        if target.gpu is not None and target.gpu.total_bytes is not None:
            text = f"{_verdict(total, target.gpu.total_bytes)}: {text}"
        options.append(f'"device" as much GPU memory ({text})')
    residence = _auto(estimate, target) if estimate.residence == "auto" else estimate.residence
    return f"{residence}; {', '.join(options)}"


def _auto(estimate: RunEstimate, target: Target) -> str:
    """Say where `cache_residence = "auto"` puts the cache; all processes count as those of one machine."""
    data = estimate.data
    setup = estimate.setup
    gpu = None if target.gpu is None else target.gpu.total_bytes
    if gpu is None and not target.on_cpu:
        return "auto, by the memory of the GPUs when training starts"
    room = Room(gpu, estimate.gpu.total, None if target.elsewhere else available_memory(), setup.world_size)
    epochs = estimate.total_steps / max(1, data.steps)
    why_not_device = FROM_HOST if setup.stages > 1 else None
    choice = choose_residence(data.cache.value, [room], epochs, not isinstance(data.cache_dir, Path), why_not_device)
    return f"auto picks {choice.residence} ({choice.reason})"


def _export(train: TrainConfig, estimate: RunEstimate) -> str:
    """Say how long an export takes, beside training, and how much host memory."""
    setup = estimate.setup
    subject = "all weights and their proof" if setup.adapter is None else "the adapter and its proof"
    seconds = f"about {duration(export_seconds(setup))} on {MEASURED_CORES} cores"
    return f"{subject} take {seconds}, and {format_bytes(export_memory(train, estimate))} of host memory"


def export_memory(train: TrainConfig, estimate: RunEstimate) -> int:
    """Return the host memory that an export and its proof add to a process."""
    return export_host(estimate.setup, DTYPE_BYTES[train.save_dtype])


def _sample(train: TrainConfig, estimate: RunEstimate, target: Target) -> str:
    """Say whether `sample`, `evaluate` and `ui` keep all parts of the model loaded, or work in phases."""
    needed = drawing_memory(train, estimate, target)
    text = ", ".join(f"{format_bytes(count)} in {name}" for name, count in needed.items())
    available = None if target.gpu is None else target.gpu.total_bytes
    if target.on_cpu:
        available = available_memory()
    if available is None:
        return f"keeps all parts loaded in {text}; with less memory works in phases"
    loaded = [name for name, count in needed.items() if count <= available]
    if len(loaded) == len(needed):
        return f"keeps all parts loaded: {text}"
    others = " and ".join(name for name in needed if name not in loaded)
    kept = f"keeps all parts loaded in {loaded[0]}, and " if loaded else ""
    parts = f"all parts take {text}, of {format_bytes(available)}"
    return f"{kept}works in phases in {others}: text encoders, denoiser, VAE ({parts})"


def drawing_memory(train: TrainConfig, estimate: RunEstimate, target: Target) -> dict[str, int]:
    """Return the bytes in which `sample` keeps all parts of the model loaded, by --dtype."""
    weights = {**count_weights(train.model.diffusers_path), TRANSFORMER.name: estimate.setup.cost.parameters}
    whole = sum(estimate.setup.cost.float32_parameters)
    return {name: drawing_bytes(weights, size, not target.on_cpu, whole) for name, size in _SAMPLE_BYTES.items()}


def _verdict(needed: int, available: int) -> str:
    return "fits" if needed <= available else DOES_NOT_FIT
