"""Check a config against the disk, the second pass of law 7."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from sd3_light.config import DatasetConfig, DirectoryConfig, Fault, LoadedConfig, ModelSize, UserError
from sd3_light.config.base import DataLocation
from sd3_light.config.cross_checks import negative_prompts, text_recon_problem, token_problems
from sd3_light.config.load_dataset import load_directories
from sd3_light.config.optimizers import INSTALL_BITSANDBYTES, OPTIMIZERS
from sd3_light.core.registry import starting_weights
from sd3_light.core.start import WeightsStart, denoiser_folder, start_source
from sd3_light.data.buckets import SIDE_STEP, buckets_for
from sd3_light.data.manifest import MANIFEST, Manifest
from sd3_light.data.sources.access import CONTAINERS, exists
from sd3_light.data.store.protocols import protocol_problem
from sd3_light.model import pipeline_folder
from sd3_light.model.base_values import with_base_values
from sd3_light.model.linears import match_targets
from sd3_light.model.positions import start_position_step
from sd3_light.model.start import configured_size, differences
from sd3_light.runlog import missing_trackers

PATH_HINT = "relative paths start at the folder of the TOML"
_STEP_TOLERANCE = 0.01  # of a step that is read from a table in bfloat16


def disk_faults(loaded: LoadedConfig, caching: bool = False, with_size: bool = True) -> list[Fault]:
    """Return all faults that the disk shows."""
    return check_disk(loaded, caching, with_size)[1]


def check_disk(
    loaded: LoadedConfig, caching: bool = False, with_size: bool = True
) -> tuple[WeightsStart | None, list[Fault]]:
    """Return the initial weights (None if they are at fault) and all faults that the disk shows.

    ``with_size`` False skips everything that depends on the size of the denoiser.
    """
    checks = _DiskChecks(loaded)
    if not caching:
        checks.libraries()
    checks.folder()
    checks.init()
    start = checks.start() if with_size else None
    checks.encoders()
    if start is not None:
        checks.encoder_widths(start)
        checks.size(start)
        checks.adapter(start)
        checks.sampling(start.size)
        checks.continued_values()
    checks.metrics(None if start is None else start.size)
    for dataset in (loaded.dataset, *loaded.eval_datasets.values()):
        # training uses a cache at a URL as it is: its machines need not have the images
        if caching or isinstance(dataset.cache_dir, Path):
            checks.sources(dataset)
        if start is not None:
            checks.buckets(dataset, start.size)
    checks.outputs()
    checks.memory()
    return start, list(dict.fromkeys(checks.faults))


class _DiskChecks:
    """Collects the faults of a config that the disk shows."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self.loaded, self.train, self.model = loaded, loaded.train, loaded.train.model
        self.faults: list[Fault] = []

    def add(self, key: str, problem: str, value: object = None, hint: str | None = None, **more: str) -> None:
        text = None if value is None else str(value)
        self.faults.append(
            Fault(**{"file": str(self.loaded.path), **more}, key=key, problem=problem, value=text, hint=hint)
        )

    @contextmanager
    def user_errors_of(self, key: str, value: object = None, hint: str | None = None) -> Iterator[None]:
        """Turn a UserError of the block into a fault of ``key``."""
        try:
            yield
        except UserError as error:
            self.add(key, str(error).removeprefix(f"{key}: "), value, hint)

    def libraries(self) -> None:
        """Check that the optional libraries that the config needs are installed."""
        for key, remedy in missing_trackers(self.train.monitoring).items():
            self.add(f"monitoring.{key}", "the package is not installed", "true", remedy)
        adapter, record = self.train.adapter, OPTIMIZERS[self.train.optimizer.type]
        if adapter is not None and adapter.base_bits < 16 and find_spec("bitsandbytes") is None:
            hint = f"run `{INSTALL_BITSANDBYTES}`, or write base_bits = 16"
            self.add("adapter.base_bits", "needs bitsandbytes, which is not installed", adapter.base_bits, hint)
        if record.package is not None and find_spec(record.package) is None:
            hint = f'run `{record.install}`, or write type = "adamw"'
            self.add("optimizer.type", f"needs {record.package}, which is not installed", hint=hint)

    # --- the model ----------------------------------------------------------------------------

    def folder(self) -> None:
        """Check that `diffusers_path` is complete; a denoiser is needed only if weights start there."""
        folder, key = self.model.diffusers_path, "model.diffusers_path"
        if not folder.is_dir():
            hint = "give the diffusers folder of an SD3, or create one with `sd3-light init`"
            self.add(key, "no such folder", folder, hint)
            return
        with self.user_errors_of(key):
            if pipeline_folder.is_unfinished(folder):
                self.add(key, "the folder is unfinished", folder, f"run `sd3-light parts DATA {folder}` again")
                return
            for part in pipeline_folder.missing_parts(folder, transformer=start_source(self.model) == folder):
                self.add(key, f"the folder lacks {part}", folder, "download or copy the whole folder")
        with self.user_errors_of(key, folder):
            pipeline_folder.check_configs(folder)

    def init(self) -> None:
        """Check that the folder in `init` contains a denoiser; the content of a file is checked with its size."""
        init, key = self.model.init, "model.init"
        if init is None or init == "random" or init == self.model.diffusers_path or init.is_file():
            return
        if not init.is_dir():
            self.add(key, "no such folder", init, 'give a folder with a denoiser, a single file, or "random"')
            return
        folder = denoiser_folder(init)
        with self.user_errors_of(key):
            for part in pipeline_folder.missing_denoiser(folder):
                problem = f"the folder has no complete denoiser: {folder.relative_to(init) / part} is missing"
                self.add(key, problem, init, "give an export, an SD3 folder or its transformer folder")

    def start(self) -> WeightsStart | None:
        """Return the initial weights, or None; other checks report missing files."""
        source = start_source(self.model)
        if source is not None and not source.is_file() and not (denoiser_folder(source) / "config.json").is_file():
            return None
        if self.model.shape is not None and not self._has_encoders():
            return None
        key = "model.size" if source is None else "model.init" if self.model.init else "model.diffusers_path"
        start = None
        with self.user_errors_of(key):
            start = starting_weights(self.model)
        return start

    def size(self, start: WeightsStart) -> None:
        """Check the keys that describe the denoiser against its weights and its number of layers."""
        model, actual = self.model, start.size
        if model.text_recon_gamma > 0 and model.text_recon_target_layer > actual.num_layers - 2:
            value, key = model.text_recon_target_layer, "model.text_recon_target_layer"
            self.add(key, value=value, **text_recon_problem(actual.num_layers))
        if start.source is None:
            return
        for key, fields in token_problems(model, actual.num_layers, actual.pos_embed_max_size).items():
            self.add(key, **fields)
        weights, hint = f"the weights in {start.source}", 'remove the key, or give init = "random"'
        if model.num_layers is not None and model.num_layers != actual.num_layers:
            self.add("model.num_layers", f"{weights} have {actual.num_layers} layers", model.num_layers, hint)
        if model.qk_norm is not None and model.qk_norm != actual.qk_norm:
            problem = f"{weights} {'have' if actual.qk_norm else 'have no'} qk-norm"
            self.add("model.qk_norm", problem, str(model.qk_norm).lower(), hint)
        if model.position_step is not None:
            with self.user_errors_of("model.position_step"):
                step = start_position_step(start)
                if step is None or abs(step / model.position_step - 1) > _STEP_TOLERANCE:
                    table = "another position table" if step is None else f"a position table of step {step:.3g}"
                    self.add("model.position_step", f"{weights} contain {table}", model.position_step, hint)
        if model.size is not None or model.shape is not None:
            # the keys above are checked on their own
            expected = configured_size(model).with_overrides(
                None if model.num_layers is None else actual.num_layers,
                None if model.qk_norm is None else actual.qk_norm,
            )
            if names := differences(expected, actual):
                values = ", ".join(f"{name} {getattr(actual, name)} (not {getattr(expected, name)})" for name in names)
                chosen = ("model.size", f'"{model.size}"') if model.shape is None else ("model.shape", None)
                self.add(chosen[0], f"{weights} have {values}", chosen[1], hint)

    def adapter(self, start: WeightsStart) -> None:
        """Check that an adapter has trained weights below it, matching layers and a file to start from."""
        adapter = self.train.adapter
        if adapter is None:
            return
        if start.source is None and self.model.init is None:
            hint = "remove train_type, or name the folder of a trained model with init"
            self.add("model.train_type", "an adapter needs trained weights, and these start at random", hint=hint)
        existing = adapter.init_from_existing
        if existing is not None and not existing.exists():
            self.add("adapter.init_from_existing", "no such file or folder", existing)
        with self.user_errors_of("adapter.target_modules", hint="see docs/finetune.md for names and patterns"):
            match_targets(start.size.linear_layers(), adapter.target_modules)

    def encoders(self) -> None:
        """Check that encoders and VAE are those of an SD3; other checks report missing files."""
        folder, length, key = self.model.diffusers_path, self.model.t5_max_length, "model.diffusers_path"
        if not self._has_encoders():
            return
        with self.user_errors_of(key, folder):
            for problem in (*_latent_problems(folder), *_text_problems(folder, length)):
                self.add(key, problem, folder)
            longest = pipeline_folder.tokenizer_length(folder / "tokenizer_3")
            if longest is not None and length > longest:
                problem, allowed = f"tokenizer_3 accepts at most {longest} tokens", f"1 to {longest}"
                self.add("model.t5_max_length", problem, length, allowed=allowed)

    def encoder_widths(self, start: WeightsStart) -> None:
        """Check that the denoiser accepts what encoders and VAE return."""
        folder, hint = self.model.diffusers_path, None
        if start.source is None:
            hint = (
                "write [model.shape] instead of a size: it takes the widths of the folder, as in `sd3-light new icons`"
            )
        if self._has_encoders():
            with suppress(UserError):  # reported with the encoders
                for problem in _width_problems(folder, self.model.t5_max_length, start.size):
                    self.add("model.diffusers_path", problem, folder, hint)

    def _has_encoders(self) -> bool:
        """Whether the configs of VAE and text encoders exist."""
        parts = ("vae", *pipeline_folder.TEXT_ENCODER_FOLDERS)
        return all((self.model.diffusers_path / part / "config.json").is_file() for part in parts)

    # --- the data -----------------------------------------------------------------------------

    def sources(self, dataset: DatasetConfig) -> None:
        """Check that the paths of a dataset TOML exist, can be read and are of the right kind."""
        for index, directory in enumerate(dataset.directories):
            for key, problem, path in _path_problems(directory):
                self.add(f"directory[{index}].{key}", problem, path, PATH_HINT, file=str(dataset.path))

    def buckets(self, dataset: DatasetConfig, size: ModelSize) -> None:
        """Check that no bucket is larger than the denoiser's position table."""
        limit = size.pos_embed_max_size * SIDE_STEP
        problem = f"the denoiser's position table ends at {limit} px"
        hint = "choose smaller resolutions, or narrower ratios (min_ar, max_ar)"
        for index, directory in enumerate(dataset.directories):
            key = f"directory[{index}].{'size_buckets' if directory.size_buckets else 'resolutions'}"
            too_wide = [str(bucket) for bucket in buckets_for(directory) if max(bucket.width, bucket.height) > limit]
            if too_wide:
                self.add(key, problem, ", ".join(too_wide), hint, file=str(dataset.path))

    def continued_values(self) -> None:
        """Check the scheduler of continued weights, and negative prompts against the text they were trained with."""
        key = "model.init" if self.model.init else "model.diffusers_path"
        if not self.model.continues_weights or any(fault.key == key for fault in self.faults):
            return
        with self.user_errors_of(key):
            text = with_base_values(self.model).uncond_text
            faults = negative_prompts(self.train, text or "zero") if self.model.uncond_text is None else ()
            self.faults += [replace(fault, file=str(self.loaded.path)) for fault in faults]

    def sampling(self, size: ModelSize) -> None:
        """Check that no sample image is larger than the denoiser's position table."""
        settings, limit = self.train.sampling, size.pos_embed_max_size * SIDE_STEP
        sizes = {"sampling.size": settings.size}
        sizes |= {f"sampling.image[{index}].size": image.size for index, image in enumerate(settings.image)}
        for key, sides in sizes.items():
            if sides is not None and max(sides) > limit:
                self.add(key, f"the denoiser's position table ends at {limit} px", list(sides), "choose a smaller size")

    def metrics(self, size: ModelSize | None) -> None:
        """Check the dataset TOML and the folder of [metrics]."""
        table = self.train.metrics
        if table is None:
            return
        if (
            not (table.features / "config.json").is_file()
            and not (table.features / pipeline_folder.JUDGE / "config.json").is_file()
        ):
            hint = "give a folder of `sd3-light parts`, or of a CLIP or vision model"
            self.add("metrics.features", "is not a model folder (no config.json)", table.features, hint)
        directories, faults = load_directories(table.dataset)
        self.faults += faults
        dataset = DatasetConfig(table.dataset, table.dataset.with_suffix(".cache"), directories)
        self.sources(dataset)
        if size is not None:
            self.buckets(dataset, size)

    # --- outputs and memory -------------------------------------------------------------------

    def outputs(self) -> None:
        """Check that output folders can be created, and that the protocols of URLs are available."""
        train, datasets = self.train, self.loaded.eval_datasets.values()
        key = "dataset" if train.cache_dir is None else "cache_dir"
        outputs = [("output_dir", train.output_dir), (key, self.loaded.dataset.cache_dir)]
        if not isinstance(train.cache_dir, str):
            outputs += [("eval_datasets", dataset.cache_dir) for dataset in datasets]
        elif train.stream_cache_dir is not None:
            outputs.append(("stream_cache_dir", train.stream_cache_dir))
        for name, output in outputs:
            if isinstance(output, str):
                if problem := protocol_problem(output):
                    self.add(name, problem, output)
                continue
            # a finished, read-only cache can be trained from with --trust-cache
            finished = name != "output_dir" and (output / MANIFEST).is_file()
            if not finished and (problem := _cannot_create(output)):
                self.add(name, problem, output, "choose another folder")

    def memory(self) -> None:
        """Check that an existing cache fits into memory if it has to be loaded there."""
        folder = self.loaded.dataset.cache_dir
        if self.train.residence != "host" or isinstance(folder, str):
            return
        explicit = self.train.cache_residence == "host"
        key, value = ("cache_residence", "host") if explicit else ("sd3_streaming_dataset", "false")
        with suppress(UserError):  # a missing or damaged manifest is reported elsewhere
            if problem := Manifest.load(folder).too_large():
                self.add(key, problem, value)


def _latent_problems(folder: Path) -> Iterator[str]:
    _, shrink = pipeline_folder.vae_shape(folder)
    if shrink * ModelSize.patch_size != SIDE_STEP:
        yield f"its VAE shrinks images {shrink} times, an SD3 VAE {SIDE_STEP // ModelSize.patch_size} times"


def _text_problems(folder: Path, t5_max_length: int) -> Iterator[str]:
    text, positions = pipeline_folder.text_shape(folder, t5_max_length), pipeline_folder.clip_positions(folder)
    if text.clip_tokens > positions:
        yield f"its tokenizer produces {text.clip_tokens} tokens and its CLIP encoders accept at most {positions}"
    if text.clip_width > text.t5_width:
        widths = f"{text.clip_l_width} + {text.clip_g_width}"
        yield f"its CLIP encoders together ({widths}) are wider than T5 ({text.t5_width})"


def _width_problems(folder: Path, t5_max_length: int, size: ModelSize) -> Iterator[str]:
    """Yield what encoders and VAE return in another width than the denoiser needs."""
    text, (channels, _) = pipeline_folder.text_shape(folder, t5_max_length), pipeline_folder.vae_shape(folder)
    if channels != size.latent_channels:
        yield f"its VAE has {channels} latent channels and the denoiser ({size.name}) needs {size.latent_channels}"
    if text.t5_width != size.text_width:
        yield f"its T5 is {text.t5_width} wide and the denoiser ({size.name}) needs {size.text_width}"
    if text.pooled_width != size.pooled_width:
        yield f"its pooled text is {text.pooled_width} wide and the denoiser ({size.name}) needs {size.pooled_width}"


def _path_problems(directory: DirectoryConfig) -> Iterator[tuple[str, str, DataLocation]]:
    sources = {key: getattr(directory, key) for key in ("path", "mask_path", "default_mask_file")}
    for key, url in sources.items():
        if isinstance(url, str) and (problem := _url_problem(url)):
            yield key, problem, url
    path, masks, mask = (None if isinstance(source, str) else source for source in sources.values())
    is_container = path is not None and path.is_file() and path.suffix.lower() in CONTAINERS
    if path is not None and path.exists() and not path.is_dir() and not is_container:
        yield "path", "neither a folder nor a .tar or .parquet file", path
    if masks is not None and masks.exists() and not masks.is_dir():
        yield "mask_path", "not a folder (use default_mask_file for one mask for all)", masks
    if mask is not None and mask.exists() and not mask.is_file():
        yield "default_mask_file", "not a file", mask
    for key, source in (("path", path), ("mask_path", masks), ("default_mask_file", mask)):
        if source is not None and not source.exists():
            yield key, "no such file or folder", source
        elif source is not None and not os.access(source, os.R_OK | (os.X_OK if source.is_dir() else 0)):
            yield key, "not readable by this user", source


def _url_problem(url: str) -> str | None:
    """Return why a source at a URL cannot be read; None if something is there."""
    try:
        return protocol_problem(url) or (None if exists(url) else "nothing found there")
    except (UserError, OSError) as error:
        return str(error)


def _cannot_create(folder: Path) -> str | None:
    """Return why a folder cannot be created or written to; None if it can."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    problem = "cannot be a folder" if existing == folder else "cannot be created"
    if not existing.is_dir():
        return f"{problem}: {existing} is {'a broken link' if existing.is_symlink() else 'a file'}"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{problem if existing != folder else 'is not writable'}: this user may not write to {existing}"
    return None
