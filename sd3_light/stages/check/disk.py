"""Check a config against the disk, the second pass of law 7."""

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from sd3_light.config import (
    SIZES,
    CacheLocation,
    DatasetConfig,
    DirectoryConfig,
    Fault,
    LoadedConfig,
    ModelSize,
    UserError,
)
from sd3_light.config.cross_checks import text_recon_problem
from sd3_light.config.optimizers import OPTIMIZERS
from sd3_light.data.buckets import SIDE_STEP, buckets_for
from sd3_light.data.manifest import MANIFEST, Manifest
from sd3_light.data.store.protocols import protocol_problem
from sd3_light.model.linears import match_targets
from sd3_light.model.pipeline_folder import (
    clip_positions,
    missing_denoiser,
    missing_parts,
    text_shape,
    tokenizer_length,
    vae_shape,
)
from sd3_light.model.quantized import INSTALL_COMMAND
from sd3_light.model.start import (
    WeightsStart,
    denoiser_folder,
    differences,
    start_source,
    where_weights_start,
)
from sd3_light.runlog import missing_trackers

_SOURCE_FILES = (".tar", ".parquet")


def disk_faults(loaded: LoadedConfig, caching: bool = False) -> list[Fault]:
    """Return all faults that the disk shows."""
    return check_disk(loaded, caching)[1]


def check_disk(loaded: LoadedConfig, caching: bool = False) -> tuple[WeightsStart | None, list[Fault]]:
    """Return the initial weights (None if they are at fault) and all faults that the disk shows."""
    faults = [] if caching else [*_tracker_faults(loaded), *_library_faults(loaded)]
    faults += [*_folder_faults(loaded), *_init_faults(loaded)]
    start, start_faults = _start(loaded)
    faults += start_faults
    faults += _encoder_faults(loaded, None if start is None else start.size)
    if start is not None:
        faults += [*_size_faults(loaded, start), *_depth_faults(loaded, start.size), *_adapter_faults(loaded, start)]
    for dataset in (loaded.dataset, *loaded.eval_datasets.values()):
        # a cache at a URL is used as it is: a machine that trains from it need not have the images
        faults += [] if isinstance(dataset.cache_dir, str) else _source_faults(dataset)
        faults += [] if start is None else _bucket_faults(dataset, start.size)
    return start, list(dict.fromkeys([*faults, *_write_faults(loaded), *_memory_faults(loaded)]))


def _library_faults(loaded: LoadedConfig) -> Iterator[Fault]:
    """Yield a fault for each optional library that the config needs and that is not installed."""
    adapter = loaded.train.adapter
    if adapter is not None and adapter.base_bits < 16 and find_spec("bitsandbytes") is None:
        hint, value = f"run `{INSTALL_COMMAND}`, or write base_bits = 16", str(adapter.base_bits)
        problem = "needs bitsandbytes, which is not installed"
        yield Fault(str(loaded.path), "adapter.base_bits", problem, value=value, hint=hint)
    record = OPTIMIZERS[loaded.train.optimizer.type]
    if record.package is not None and find_spec(record.package) is None:
        hint = f'run `{record.install}`, or write type = "adamw"'
        yield Fault(str(loaded.path), "optimizer.type", f"needs {record.package}, which is not installed", hint=hint)


# --- the model --------------------------------------------------------------------------------


def _folder_faults(loaded: LoadedConfig) -> Iterator[Fault]:
    """Yield faults if `diffusers_path` is incomplete; a denoiser is needed only if weights start there."""
    model, file, key = loaded.train.model, str(loaded.path), "model.diffusers_path"
    folder = model.diffusers_path
    if not folder.is_dir():
        hint = "give the diffusers folder of an SD3, or create one with `sd3-light init`"
        yield Fault(file, key, "no such folder", value=str(folder), hint=hint)
        return
    try:
        missing = missing_parts(folder, transformer=start_source(model) == folder)
    except UserError as error:
        yield Fault(file, key, str(error))
        return
    for part in missing:
        yield Fault(file, key, f"the folder lacks {part}", value=str(folder), hint="download or copy the whole folder")


def _init_faults(loaded: LoadedConfig) -> Iterator[Fault]:
    """Yield faults if the folder in `init` does not contain a denoiser."""
    init, file, key = loaded.train.model.init, str(loaded.path), "model.init"
    if init is None or init == "random" or init == loaded.train.model.diffusers_path:
        return
    if init.is_file():
        return  # its content is checked when its size is read
    if not init.is_dir():
        hint = 'give a folder with a denoiser, a single file, or "random"'
        yield Fault(file, key, "no such folder", value=str(init), hint=hint)
        return
    folder = denoiser_folder(init)
    try:
        missing = missing_denoiser(folder)
    except UserError as error:
        yield Fault(file, key, str(error))
        return
    for part in missing:
        problem = f"the folder has no complete denoiser: {folder.relative_to(init) / part} is missing"
        yield Fault(file, key, problem, value=str(init), hint="give an export, an SD3 folder or its transformer folder")


def _start(loaded: LoadedConfig) -> tuple[WeightsStart | None, list[Fault]]:
    """Return the initial weights, or None and the faults; other checks report missing files."""
    model = loaded.train.model
    source = start_source(model)
    if source is not None and not source.is_file() and not (denoiser_folder(source) / "config.json").is_file():
        return None, []
    try:
        return where_weights_start(model), []
    except UserError as error:
        key = "model.size" if source is None else "model.init" if model.init else "model.diffusers_path"
        return None, [Fault(str(loaded.path), key, str(error).removeprefix("model.size: "))]


def _size_faults(loaded: LoadedConfig, start: WeightsStart) -> Iterator[Fault]:
    """Yield faults for keys that contradict the weights that the denoiser starts from."""
    model, file = loaded.train.model, str(loaded.path)
    if start.source is None:
        return
    actual, hint = start.size, 'remove the key, or give init = "random"'
    if model.num_layers is not None and model.num_layers != actual.num_layers:
        problem = f"the weights in {start.source} have {actual.num_layers} layers"
        yield Fault(file, "model.num_layers", problem, value=str(model.num_layers), hint=hint)
    if model.qk_norm is not None and model.qk_norm != actual.qk_norm:
        problem = f"the weights in {start.source} {'have' if actual.qk_norm else 'have no'} qk-norm"
        yield Fault(file, "model.qk_norm", problem, value=str(model.qk_norm).lower(), hint=hint)
    if model.size is not None:
        # the two keys above are checked on their own
        expected = SIZES[model.size].with_overrides(
            None if model.num_layers is None else actual.num_layers, None if model.qk_norm is None else actual.qk_norm
        )
        if names := differences(expected, actual):
            values = ", ".join(f"{name} {getattr(actual, name)} (not {getattr(expected, name)})" for name in names)
            yield Fault(
                file, "model.size", f"the weights in {start.source} have {values}", f'"{model.size}"', hint=hint
            )


def _depth_faults(loaded: LoadedConfig, size: ModelSize) -> Iterator[Fault]:
    """Yield a fault if text reconstruction uses a layer that the denoiser does not have."""
    model, key = loaded.train.model, "model.text_recon_target_layer"
    if model.text_recon_gamma > 0 and model.text_recon_target_layer > size.num_layers - 2:
        value = str(model.text_recon_target_layer)
        yield Fault(str(loaded.path), key, value=value, **text_recon_problem(size.num_layers))


def _adapter_faults(loaded: LoadedConfig, start: WeightsStart) -> Iterator[Fault]:
    """Yield faults if an adapter has no trained weights below it, no matching layers or no file to start from."""
    adapter, file = loaded.train.adapter, str(loaded.path)
    if adapter is None:
        return
    if start.source is None and loaded.train.model.init is None:
        hint = "remove train_type, or name the folder of a trained model with init"
        yield Fault(file, "model.train_type", "an adapter needs trained weights, and these start at random", hint=hint)
    existing = adapter.init_from_existing
    if existing is not None and not existing.exists():
        yield Fault(file, "adapter.init_from_existing", "no such file or folder", value=str(existing))
    try:
        match_targets(start.size.linear_layers(), adapter.target_modules)
    except UserError as error:
        problem = str(error).removeprefix("adapter.target_modules: ")
        yield Fault(file, "adapter.target_modules", problem, hint="see docs/finetune.md for names and patterns")


def _encoder_faults(loaded: LoadedConfig, size: ModelSize | None) -> Iterator[Fault]:
    """Yield faults if encoders, VAE and denoiser do not fit each other; other checks report missing files."""
    folder, file, key = loaded.train.model.diffusers_path, str(loaded.path), "model.diffusers_path"
    configs = [folder / part / "config.json" for part in ("vae", "text_encoder", "text_encoder_2", "text_encoder_3")]
    if not all(path.is_file() for path in configs):
        return
    try:
        problems = [*_latent_problems(folder), *_text_problems(folder, loaded.train.model.t5_max_length, size)]
        longest = tokenizer_length(folder / "tokenizer_3")
    except UserError as error:
        problems, longest = [str(error)], None
    yield from (Fault(file, key, problem, value=str(folder)) for problem in problems)
    if longest is not None and loaded.train.model.t5_max_length > longest:
        value = str(loaded.train.model.t5_max_length)
        yield Fault(
            file,
            "model.t5_max_length",
            f"tokenizer_3 accepts at most {longest} tokens",
            value,
            allowed=f"1 to {longest}",
        )


def _latent_problems(folder: Path) -> Iterator[str]:
    channels, shrink = vae_shape(folder)
    if channels != ModelSize.latent_channels:
        yield f"its VAE has {channels} latent channels and the denoiser needs {ModelSize.latent_channels}"
    if shrink * ModelSize.patch_size != SIDE_STEP:
        yield f"its VAE shrinks images {shrink} times, an SD3 VAE {SIDE_STEP // ModelSize.patch_size} times"


def _text_problems(folder: Path, t5_max_length: int, size: ModelSize | None) -> Iterator[str]:
    text, positions = text_shape(folder, t5_max_length), clip_positions(folder)
    if text.clip_tokens > positions:
        yield f"its tokenizer produces {text.clip_tokens} tokens and its CLIP encoders accept at most {positions}"
    if text.clip_width > text.t5_width:
        widths = f"{text.clip_l_width} + {text.clip_g_width}"
        yield f"its CLIP encoders together ({widths}) are wider than T5 ({text.t5_width})"
    if size is None:
        return
    if text.t5_width != size.text_width:
        yield f"its T5 is {text.t5_width} wide and the denoiser ({size.name}) needs {size.text_width}"
    if text.pooled_width != size.pooled_width:
        yield f"its pooled text is {text.pooled_width} wide and the denoiser ({size.name}) needs {size.pooled_width}"


# --- the data ---------------------------------------------------------------------------------


def _source_faults(dataset: DatasetConfig) -> Iterator[Fault]:
    """Yield a fault for each path of a dataset TOML that is missing, unreadable or of the wrong kind."""
    for index, directory in enumerate(dataset.directories):
        for key, problem, path in _path_problems(directory):
            hint = "relative paths start at the folder of the TOML"
            yield Fault(str(dataset.path), f"directory[{index}].{key}", problem, value=str(path), hint=hint)


def _path_problems(directory: DirectoryConfig) -> Iterator[tuple[str, str, Path]]:
    path, masks, mask = directory.path, directory.mask_path, directory.default_mask_file
    if path.exists() and not path.is_dir() and path.suffix.lower() not in _SOURCE_FILES:
        yield "path", "neither a folder nor a .tar or .parquet file", path
    if masks is not None and masks.exists() and not masks.is_dir():
        yield "mask_path", "not a folder (use default_mask_file for one mask for all)", masks
    if mask is not None and mask.is_dir():
        yield "default_mask_file", "a folder, not a file", mask
    for key, source in (("path", path), ("mask_path", masks), ("default_mask_file", mask)):
        if source is not None and not source.exists():
            yield key, "no such file or folder", source
        elif source is not None and not os.access(source, os.R_OK | (os.X_OK if source.is_dir() else 0)):
            yield key, "not readable by this user", source


def _bucket_faults(dataset: DatasetConfig, size: ModelSize) -> Iterator[Fault]:
    """Yield a fault for buckets that are larger than the denoiser's position table."""
    limit = size.pos_embed_max_size * SIDE_STEP
    for index, directory in enumerate(dataset.directories):
        key = f"directory[{index}].{'size_buckets' if directory.size_buckets else 'resolutions'}"
        too_wide = [str(bucket) for bucket in buckets_for(directory) if max(bucket.width, bucket.height) > limit]
        if too_wide:
            problem = f"the denoiser's position table ends at {limit} px"
            hint = "choose smaller resolutions, or narrower ratios (min_ar, max_ar)"
            yield Fault(str(dataset.path), key, problem, value=", ".join(too_wide), hint=hint)


# --- output folders ---------------------------------------------------------------------


def _write_faults(loaded: LoadedConfig) -> Iterator[Fault]:
    """Yield faults for output folders that cannot be created and URLs whose protocol is not available."""
    train = loaded.train
    key = "dataset" if train.cache_dir is None else "cache_dir"
    outputs: list[tuple[str, CacheLocation | None]] = [
        ("output_dir", train.output_dir),
        (key, loaded.dataset.cache_dir),
    ]
    if isinstance(train.cache_dir, str):
        outputs.append(("stream_cache_dir", train.stream_cache_dir))
    else:
        outputs += [("eval_datasets", dataset.cache_dir) for dataset in loaded.eval_datasets.values()]
    for name, output in outputs:
        if isinstance(output, str) and (problem := protocol_problem(output)):
            yield Fault(str(loaded.path), name, problem, value=output)
        # a finished, read-only cache can be trained from with --trust_cache
        finished = name != "output_dir" and isinstance(output, Path) and (output / MANIFEST).is_file()
        if isinstance(output, Path) and not finished and (problem := _cannot_create(output)):
            yield Fault(str(loaded.path), name, problem, value=str(output), hint="choose another folder")


def _tracker_faults(loaded: LoadedConfig) -> Iterator[Fault]:
    """Yield a fault for each enabled tracker whose package is not installed."""
    for key, remedy in missing_trackers(loaded.train.monitoring).items():
        yield Fault(str(loaded.path), f"monitoring.{key}", "the package is not installed", value="true", hint=remedy)


def _memory_faults(loaded: LoadedConfig) -> Iterator[Fault]:
    """Yield a fault if an existing cache has to be loaded into memory and does not fit."""
    folder = loaded.dataset.cache_dir
    if loaded.train.sd3_streaming_dataset or isinstance(folder, str):
        return
    with suppress(UserError):  # a missing or damaged manifest is reported elsewhere
        if problem := Manifest.load(folder).too_large():
            yield Fault(str(loaded.path), "sd3_streaming_dataset", problem, value="false")


def _cannot_create(folder: Path) -> str | None:
    """Return why a folder cannot be created or written to; None if it can."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    problem = "cannot be a folder" if existing == folder else "cannot be created"
    if not existing.is_dir():
        return f"{problem}: {existing} is {'a broken link' if existing.is_symlink() else 'a file'}"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{problem if existing != folder else 'is not writable'}: this user may not write to {existing}"
    return None
