"""Check a config against the disk, the second pass of law 7."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from sd3_light.config import DatasetConfig, DirectoryConfig, Fault, LoadedConfig, UserError
from sd3_light.config.base import DataLocation
from sd3_light.config.cross_checks import negative_prompts
from sd3_light.config.load_dataset import load_directories
from sd3_light.config.optimizers import INSTALL_BITSANDBYTES, OPTIMIZERS
from sd3_light.core.registry import family_of, starting_weights
from sd3_light.core.start import WeightsStart, denoiser_folder, start_source
from sd3_light.data.manifest import MANIFEST, Manifest
from sd3_light.model import folder as pipeline_folder
from sd3_light.model.base_values import with_base_values
from sd3_light.runlog import missing_trackers
from sd3_light.sources.access import CONTAINERS, exists
from sd3_light.sources.buckets import buckets_for
from sd3_light.urls import protocol_problem

PATH_HINT = "relative paths start at the folder of the TOML"


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
        checks.fast_blocks()
    checks.add_all(checks.family.checks.folder_faults(checks.model))
    checks.init()
    start = checks.start() if with_size else None
    checks.add_all(checks.family.checks.encoder_faults(checks.model, start))
    if start is not None:
        checks.add_all(checks.family.checks.key_faults(checks.model, start))
        checks.adapter(start)
        checks.sampling(start)
        checks.continued_values()
    checks.metrics(start)
    for dataset in (loaded.dataset, *loaded.eval_datasets.values()):
        # training uses a cache at a URL as it is: its machines need not have the images
        if caching or isinstance(dataset.cache_dir, Path):
            checks.sources(dataset)
        if start is not None:
            checks.buckets(dataset, start)
    checks.outputs()
    checks.memory()
    return start, list(dict.fromkeys(checks.faults))


class _DiskChecks:
    """Collects the faults of a config that the disk shows."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self.loaded = loaded
        self.train = loaded.train
        self.model = loaded.train.model
        self.family = family_of(self.model)
        self.faults: list[Fault] = []

    def add(self, key: str, problem: str, value: object = None, hint: str | None = None, **more: str) -> None:
        text = None if value is None else str(value)
        self.faults.append(
            Fault(**{"file": str(self.loaded.path), **more}, key=key, problem=problem, value=text, hint=hint)
        )

    def add_all(self, faults: Iterable[Fault]) -> None:
        """Add faults of this config."""
        self.faults += [replace(fault, file=str(self.loaded.path)) for fault in faults]

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

    def fast_blocks(self) -> None:
        """Check that the family has the kernels that the config requires."""
        if self.family.fast_blocks is not None:
            return
        for key, remedy in (("fast", 'write fast = "auto"'), ("fp8", "write fp8 = false")):
            if getattr(self.train, key) is True:
                self.add(key, f"{self.family.title} has no fast blocks", "true", remedy)

    def init(self) -> None:
        """Check that the folder in `init` contains a denoiser; the content of a file is checked with its size."""
        init, key = self.model.init, "model.init"
        if init is None or init == "random" or init == self.model.diffusers_path or init.is_file():
            return
        if not init.is_dir():
            self.add(key, "no such folder", init, 'give a folder with a denoiser, a single file, or "random"')
            return
        folder = denoiser_folder(init)
        hint = f"give an export, a folder of {self.family.title} or its transformer folder"
        with self.user_errors_of(key):
            for part in pipeline_folder.missing_denoiser(folder):
                problem = f"the folder has no complete denoiser: {folder.relative_to(init) / part} is missing"
                self.add(key, problem, init, hint)

    def start(self) -> WeightsStart | None:
        """Return the initial weights, or None; other checks report missing files."""
        if not self.family.checks.has_size(self.model):
            return None
        source = start_source(self.model)
        key = "model.size" if source is None else "model.init" if self.model.init else "model.diffusers_path"
        start = None
        with self.user_errors_of(key):
            start = starting_weights(self.model)
        return start

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
            self.family.cost(start, self.model).adapter_parameters(adapter)

    # --- the data -----------------------------------------------------------------------------

    def sources(self, dataset: DatasetConfig) -> None:
        """Check that the paths of a dataset TOML exist, can be read and are of the right kind."""
        for index, directory in enumerate(dataset.directories):
            for key, problem, path in _path_problems(directory):
                self.add(f"directory[{index}].{key}", problem, path, PATH_HINT, file=str(dataset.path))

    def buckets(self, dataset: DatasetConfig, start: WeightsStart) -> None:
        """Check that no bucket is larger than the denoiser's position table."""
        limit = self.family.checks.largest_side(start)
        if limit is None:
            return
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
            self.add_all(faults)

    def sampling(self, start: WeightsStart) -> None:
        """Check that no sample image is larger than the denoiser's position table."""
        settings = self.train.sampling
        limit = self.family.checks.largest_side(start)
        sizes = {"sampling.size": settings.size}
        sizes |= {f"sampling.image[{index}].size": image.size for index, image in enumerate(settings.image)}
        for key, sides in sizes.items():
            if limit is not None and sides is not None and max(sides) > limit:
                self.add(key, f"the denoiser's position table ends at {limit} px", list(sides), "choose a smaller size")

    def metrics(self, start: WeightsStart | None) -> None:
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
        if start is not None:
            self.buckets(dataset, start)

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
