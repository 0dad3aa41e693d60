"""The second pass of law 7: the faults of a config that only the disk can show."""

import os
from collections.abc import Iterator
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
from sd3_light.data.manifest import MANIFEST
from sd3_light.data.memory import manifest_bytes, too_large
from sd3_light.data.store.protocols import protocol_problem
from sd3_light.model.linears import linear_layers, match_targets
from sd3_light.model.pipeline_folder import (
    clip_positions,
    missing_denoiser,
    missing_parts,
    text_shape,
    tokenizer_length,
)
from sd3_light.model.pipeline_folder import vae_shape as read_vae_shape
from sd3_light.model.quantized import INSTALL
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
    """All faults that the disk shows; a valid config gives none."""
    faults = [] if caching else [*_tracker_faults(loaded), *_library_faults(loaded)]
    faults += [*_folder_faults(loaded), *_init_faults(loaded)]
    start, start_faults = _start(loaded)
    faults += start_faults
    faults += _encoder_faults(loaded, None if start is None else start.size)
    if start is not None:
        faults += [*_size_faults(loaded, start), *_depth_faults(loaded, start.size), *_adapter_faults(loaded, start)]
    for dataset in (loaded.dataset, *loaded.eval_datasets.values()):
        # a cache at a URL is taken as it is: a machine that trains from it need not have the pictures
        faults += [] if isinstance(dataset.cache_dir, str) else _source_faults(dataset)
        faults += [] if start is None else _bucket_faults(dataset, start.size)
    return list(dict.fromkeys([*faults, *_write_faults(loaded), *_memory_faults(loaded)]))


def _library_faults(loaded: LoadedConfig) -> Iterator[Fault]:
    """8-bit AdamW and weights in few bits are another library's, installed only by those who want it."""
    adapter, missing = loaded.train.adapter, "needs bitsandbytes, which is not installed"
    if adapter is not None and adapter.base_bits < 16 and find_spec("bitsandbytes") is None:
        hint, given = f"run `{INSTALL}`, or write base_bits = 16", str(adapter.base_bits)
        yield Fault(str(loaded.path), "adapter.base_bits", missing, given=given, hint=hint)
    record = OPTIMIZERS[loaded.train.optimizer.type]
    if record.package is not None and find_spec(record.package) is None:
        hint, problem = (
            f'run `{record.install}`, or write type = "adamw"',
            f"needs {record.package}, which is not installed",
        )
        yield Fault(str(loaded.path), "optimizer.type", problem, hint=hint)


# --- the model --------------------------------------------------------------------------------


def _folder_faults(loaded: LoadedConfig) -> Iterator[Fault]:
    """`diffusers_path` is a complete SD3; its denoiser is needed only where weights start there."""
    model, file, key = loaded.train.model, str(loaded.path), "model.diffusers_path"
    folder = model.diffusers_path
    if not folder.is_dir():
        hint = "give the diffusers folder of an SD3, or make one with `sd3-light init`"
        yield Fault(file, key, "no such folder", given=str(folder), hint=hint)
        return
    try:
        missing = missing_parts(folder, transformer=start_source(model) == folder)
    except UserError as error:
        yield Fault(file, key, str(error))
        return
    for part in missing:
        yield Fault(file, key, f"the folder lacks {part}", given=str(folder), hint="fetch or copy the whole SD3 folder")


def _init_faults(loaded: LoadedConfig) -> Iterator[Fault]:
    """`init` names a folder that holds a denoiser."""
    init, file, key = loaded.train.model.init, str(loaded.path), "model.init"
    if init is None or init == "random" or init == loaded.train.model.diffusers_path:
        return
    if init.is_file():
        return  # what it holds is looked at where its size is asked for
    if not init.is_dir():
        hint = 'give a folder with a denoiser, a single file, or "random"'
        yield Fault(file, key, "no such folder", given=str(init), hint=hint)
        return
    place = denoiser_folder(init)
    try:
        missing = missing_denoiser(place)
    except UserError as error:
        yield Fault(file, key, str(error))
        return
    for part in missing:
        problem = f"the folder holds no whole denoiser: {place.relative_to(init) / part} is missing"
        yield Fault(file, key, problem, given=str(init), hint="give an export, an SD3 folder or its transformer folder")


def _start(loaded: LoadedConfig) -> tuple[WeightsStart | None, list[Fault]]:
    """Where weights start, or None and why it cannot be told; a missing file is others' to report."""
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
    """A key that describes the denoiser agrees with the folder that it comes from."""
    model, file = loaded.train.model, str(loaded.path)
    if start.source is None:
        return
    found, hint = start.size, 'remove the key, or give init = "random"'
    if model.num_layers is not None and model.num_layers != found.num_layers:
        problem = f"the weights in {start.source} have {found.num_layers} layers"
        yield Fault(file, "model.num_layers", problem, given=str(model.num_layers), hint=hint)
    if model.qk_norm is not None and model.qk_norm != found.qk_norm:
        problem = f"the weights in {start.source} {'have' if found.qk_norm else 'have no'} qk-norm"
        yield Fault(file, "model.qk_norm", problem, given=str(model.qk_norm).lower(), hint=hint)
    if model.size is not None:
        # what the two keys above say of their own is theirs to answer for
        asked = SIZES[model.size].with_overrides(
            None if model.num_layers is None else found.num_layers, None if model.qk_norm is None else found.qk_norm
        )
        if differ := differences(asked, found):
            said = ", ".join(f"{name} {getattr(found, name)} (not {getattr(asked, name)})" for name in differ)
            yield Fault(file, "model.size", f"the weights in {start.source} have {said}", f'"{model.size}"', hint=hint)


def _depth_faults(loaded: LoadedConfig, size: ModelSize) -> Iterator[Fault]:
    """Text reconstruction reads a layer that the denoiser has."""
    model, key = loaded.train.model, "model.text_recon_target_layer"
    if model.text_recon_gamma > 0 and model.text_recon_target_layer > size.num_layers - 2:
        given = str(model.text_recon_target_layer)
        yield Fault(str(loaded.path), key, given=given, **text_recon_problem(size.num_layers))


def _adapter_faults(loaded: LoadedConfig, start: WeightsStart) -> Iterator[Fault]:
    """An adapter has trained weights under it, layers to be on, and what it starts from is there."""
    adapter, file = loaded.train.adapter, str(loaded.path)
    if adapter is None:
        return
    if start.source is None and loaded.train.model.init is None:
        hint = "remove train_type, or name the folder of a trained model with init"
        yield Fault(
            file, "model.train_type", "an adapter belongs on trained weights, and these start at random", hint=hint
        )
    existing = adapter.init_from_existing
    if existing is not None and not existing.exists():
        yield Fault(file, "adapter.init_from_existing", "no such file or folder", given=str(existing))
    try:
        match_targets(linear_layers(start.size), adapter.target_modules)
    except UserError as error:
        problem = str(error).removeprefix("adapter.target_modules: ")
        yield Fault(file, "adapter.target_modules", problem, hint="names and patterns are in docs/finetune.md")


def _encoder_faults(loaded: LoadedConfig, size: ModelSize | None) -> Iterator[Fault]:
    """Text encoders and VAE fit the denoiser, and texts fit the encoders; a missing file is others' to report."""
    folder, file, key = loaded.train.model.diffusers_path, str(loaded.path), "model.diffusers_path"
    configs = [folder / part / "config.json" for part in ("vae", "text_encoder", "text_encoder_2", "text_encoder_3")]
    if not all(path.is_file() for path in configs):
        return
    try:
        problems = [*_latent_problems(folder), *_text_problems(folder, loaded.train.model.t5_max_length, size)]
        longest = tokenizer_length(folder / "tokenizer_3")
    except UserError as error:
        problems, longest = [str(error)], None
    yield from (Fault(file, key, problem, given=str(folder)) for problem in problems)
    if longest is not None and loaded.train.model.t5_max_length > longest:
        given = str(loaded.train.model.t5_max_length)
        yield Fault(
            file, "model.t5_max_length", f"tokenizer_3 takes {longest} tokens at most", given, allowed=f"1 to {longest}"
        )


def _latent_problems(folder: Path) -> Iterator[str]:
    channels, shrink = read_vae_shape(folder)
    if channels != ModelSize.latent_channels:
        yield f"its VAE has {channels} latent channels and the denoiser takes {ModelSize.latent_channels}"
    if shrink * ModelSize.patch_size != SIDE_STEP:
        yield f"its VAE shrinks pictures {shrink} times, an SD3's {SIDE_STEP // ModelSize.patch_size} times"


def _text_problems(folder: Path, t5_max_length: int, size: ModelSize | None) -> Iterator[str]:
    text, positions = text_shape(folder, t5_max_length), clip_positions(folder)
    if text.clip_tokens > positions:
        yield f"its tokenizer gives {text.clip_tokens} tokens and its CLIP encoders take {positions} at most"
    if text.clip_width > text.t5_width:
        yield f"both CLIPs together are wider ({text.clip_l_width} + {text.clip_g_width}) than T5 ({text.t5_width})"
    if size is None:
        return
    if text.t5_width != size.text_width:
        yield f"its T5 is {text.t5_width} wide and the denoiser ({size.name}) takes {size.text_width}"
    if text.pooled_width != size.pooled_width:
        yield f"its pooled text is {text.pooled_width} wide and the denoiser ({size.name}) takes {size.pooled_width}"


# --- the data ---------------------------------------------------------------------------------


def _source_faults(dataset: DatasetConfig) -> Iterator[Fault]:
    """Every path of a dataset TOML is there and can be read."""
    for index, directory in enumerate(dataset.directories):
        for key, problem, path in _path_problems(directory):
            hint = "relative paths are taken from the folder of the TOML"
            yield Fault(str(dataset.path), f"directory[{index}].{key}", problem, given=str(path), hint=hint)


def _path_problems(directory: DirectoryConfig) -> Iterator[tuple[str, str, Path]]:
    path, masks, mask = directory.path, directory.mask_path, directory.default_mask_file
    if path.exists() and not path.is_dir() and path.suffix.lower() not in _SOURCE_FILES:
        yield "path", "neither a folder nor a .tar or .parquet file", path
    if masks is not None and masks.exists() and not masks.is_dir():
        yield "mask_path", "not a folder (one mask for all is default_mask_file)", masks
    if mask is not None and mask.is_dir():
        yield "default_mask_file", "a folder, not a file", mask
    for key, place in (("path", path), ("mask_path", masks), ("default_mask_file", mask)):
        if place is not None and not place.exists():
            yield key, "no such file or folder", place
        elif place is not None and not os.access(place, os.R_OK | (os.X_OK if place.is_dir() else 0)):
            yield key, "may not be read by this user", place


def _bucket_faults(dataset: DatasetConfig, size: ModelSize) -> Iterator[Fault]:
    """Every bucket is made of whole patches and lies inside the denoiser's table of positions."""
    limit = size.pos_embed_max_size * SIDE_STEP
    for index, directory in enumerate(dataset.directories):
        key = f"directory[{index}].{'size_buckets' if directory.size_buckets else 'resolutions'}"
        buckets = buckets_for(directory)
        odd = [str(one) for one in buckets if one.width % SIDE_STEP or one.height % SIDE_STEP]
        far = [str(one) for one in buckets if max(one.width, one.height) > limit]
        if odd:
            yield Fault(str(dataset.path), key, f"sides are multiples of {SIDE_STEP}", given=", ".join(odd))
        if far:
            problem = f"the denoiser's position table ends at {limit} px"
            hint = "choose smaller resolutions, or narrower ratios (min_ar, max_ar)"
            yield Fault(str(dataset.path), key, problem, given=", ".join(far), hint=hint)


# --- what will be written ---------------------------------------------------------------------


def _write_faults(loaded: LoadedConfig) -> Iterator[Fault]:
    """Runs and caches have a place where they can be made; a cache at a URL has a protocol that can be read."""
    train = loaded.train
    key = "dataset" if train.cache_dir is None else "cache_dir"
    places: list[tuple[str, CacheLocation | None]] = [("output_dir", train.output_dir), (key, loaded.dataset.cache_dir)]
    if isinstance(train.cache_dir, str):
        places.append(("stream_cache_dir", train.stream_cache_dir))
    else:
        places += [("eval_datasets", dataset.cache_dir) for dataset in loaded.eval_datasets.values()]
    for name, place in places:
        if isinstance(place, str) and (problem := protocol_problem(place)):
            yield Fault(str(loaded.path), name, problem, given=place)
        # a finished cache that may only be read is trained from with --trust_cache
        finished = name != "output_dir" and isinstance(place, Path) and (place / MANIFEST).is_file()
        if isinstance(place, Path) and not finished and (problem := _cannot_make(place)):
            yield Fault(str(loaded.path), name, problem, given=str(place), hint="choose another place")


def _tracker_faults(loaded: LoadedConfig) -> Iterator[Fault]:
    """The package of every tracker that is asked for is installed."""
    for key, remedy in missing_trackers(loaded.train.monitoring).items():
        yield Fault(str(loaded.path), f"monitoring.{key}", "the package is not installed", given="true", hint=remedy)


def _memory_faults(loaded: LoadedConfig) -> Iterator[Fault]:
    """A cache that is to be held in memory fits there, if it is there to be looked at."""
    folder = loaded.dataset.cache_dir
    if loaded.train.sd3_streaming_dataset or isinstance(folder, str):
        return
    size = manifest_bytes(folder / "manifest.json")
    if size is not None and (problem := too_large(size)):
        yield Fault(str(loaded.path), "sd3_streaming_dataset", problem, given="false")


def _cannot_make(folder: Path) -> str | None:
    """Why a folder cannot be made or written to; None where it can."""
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    what = "cannot be a folder" if there == folder else "cannot be made"
    if not there.is_dir():
        return f"{what}: {there} is {'a broken link' if there.is_symlink() else 'a file'}"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{what if there != folder else 'cannot be written to'}: {there} may not be written by this user"
    return None
