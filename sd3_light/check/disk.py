"""Check a config against the disk, the second pass of law 7."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from sd3_light.config import DatasetConfig, DirectoryConfig, Fault, LoadedConfig, Resolution, UserError
from sd3_light.config.base import DataLocation
from sd3_light.config.cross_checks import negative_prompts
from sd3_light.config.family_keys import AUTO, unknown_keys
from sd3_light.config.load_dataset import load_directories
from sd3_light.config.optimizers import INSTALL_BITSANDBYTES, OPTIMIZERS
from sd3_light.config.schema_reward import PYTHON, WORLD
from sd3_light.core.clips import clip_faults
from sd3_light.core.family import Family
from sd3_light.core.registry import family_of, names_family
from sd3_light.core.start import WeightsStart, denoiser_folder, start_source
from sd3_light.data.manifest import MANIFEST, Manifest
from sd3_light.data.prompt_lists import read_prompts
from sd3_light.evaluate.marked import require_marked
from sd3_light.model import folder as pipeline_folder
from sd3_light.model.base_values import with_base_values
from sd3_light.model.part_configs import read_config
from sd3_light.model.vision import require_images, teacher_width
from sd3_light.runlog import missing_trackers
from sd3_light.sources.access import CONTAINERS, exists
from sd3_light.sources.buckets import buckets_for
from sd3_light.sources.exclusions import read_exclusions
from sd3_light.sources.listing import VIDEOS
from sd3_light.sources.video import has_av
from sd3_light.urls import protocol_problem
from sd3_light.world.captions import parse_caption

_EULER = "FlowMatchEulerDiscreteScheduler"
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
    start = None
    if checks.family is not None:
        start = _check_model(checks, checks.family, caching, with_size)
    checks.metrics()
    checks.reward()
    for dataset in (loaded.dataset, *loaded.eval_datasets.values()):
        # training uses a cache at a URL as it is: its machines need not have the images
        if caching or isinstance(dataset.cache_dir, Path):
            checks.sources(dataset)
        checks.buckets(dataset)
        checks.clips(dataset)
        checks.references(dataset)
    checks.outputs()
    checks.memory()
    return start, list(dict.fromkeys(checks.faults))


def _check_model(checks: "_DiskChecks", family: Family, caching: bool, with_size: bool) -> WeightsStart | None:
    """Check everything that depends on the family, and return the initial weights."""
    model = checks.model
    if names_family(model):
        checks.add_all(unknown_keys(checks.loaded.train.model, "model.", family.name, family.title))
    if not caching:
        checks.engines(family)
    checks.add_all(family.checks.folder_faults(model))
    checks.init(family)
    start = checks.start(family) if with_size else None
    checks.add_all(family.checks.encoder_faults(model, start))
    if start is not None:
        checks.add_all(family.checks.key_faults(checks.train, start))
        checks.objective(family)
        checks.distillation(family, start)
        with checks.model_errors_of("model.diffusers_path"):
            checks.single_steps(family)
        checks.adapter(family, start)
        checks.training_adapter(family, start)
        with checks.model_errors_of("model.diffusers_path"):
            checks.largest_side = family.checks.largest_side(start, model)
            checks.step = family.checks.side_step(model)
        checks.sampling()
        with checks.model_errors_of("model.diffusers_path"):
            checks.sampled_frames(family)
        checks.sampled_references(family)
        checks.continued_values()
    return start


class _DiskChecks:
    """Collects the faults of a config that the disk shows; without a known family those of its model are left out."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self.loaded = loaded
        self.train = loaded.train
        self.faults: list[Fault] = []
        self.family: Family | None = None
        self.largest_side: int | None = None
        self.step = 16
        names_folder = self.train.model.type == AUTO or self.train.model.diffusers_path.is_file()
        key = "model.diffusers_path" if names_folder else "model.type"
        with self.user_errors_of(key):
            self.family = family_of(self.train.model)
            self.train = self.family.completed(self.train)
        self.model = self.train.model

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

    @contextmanager
    def model_errors_of(self, key: str, hint: str | None = None) -> Iterator[None]:
        """Turn a UserError of a block that reads the model folder into a fault of ``key``.

        If the folder has a fault, the error only follows from it and is left out.
        """
        is_faulty = any(fault.key == "model.diffusers_path" for fault in self.faults)
        with suppress(UserError) if is_faulty else self.user_errors_of(key, hint=hint):
            yield

    def libraries(self) -> None:
        """Check that the optional libraries that the config needs are installed."""
        for key, remedy in missing_trackers(self.train.monitoring).items():
            self.add(f"monitoring.{key}", "the package is not installed", "true", remedy)
        adapter = self.train.adapter
        record = OPTIMIZERS[self.train.optimizer.type]
        if adapter is not None and adapter.base_bits == 4 and find_spec("bitsandbytes") is None:
            hint = f"run `{INSTALL_BITSANDBYTES}`, or write base_bits = 8"
            self.add("adapter.base_bits", "needs bitsandbytes, which is not installed", adapter.base_bits, hint)
        if record.package is not None and find_spec(record.package) is None:
            hint = f'run `{record.install}`, or write type = "adamw"'
            self.add("optimizer.type", f"needs {record.package}, which is not installed", hint=hint)

    # --- the model ----------------------------------------------------------------------------

    def objective(self, family: Family) -> None:
        """Check that the family has the terms of the objective, and a teacher's folder a denoiser of the family.

        The folder of `model.teacher_path` has a vision model.
        """
        if self.model.teacher_path is not None:
            with self.user_errors_of("model.teacher_path", self.model.teacher_path):
                require_images(family)
                teacher_width(self.model.teacher_path)
        if self.train.objective is not None:
            self.add_all(unknown_keys(self.train.objective, "objective.", family.name, family.title))
        folder = self.train.terms.teacher
        if isinstance(folder, Path):
            with self.user_errors_of(self.train.terms.teacher_key, folder):
                family.weights.require(denoiser_folder(folder))

    def distillation(self, family: Family, start: WeightsStart) -> None:
        """Check that the denoiser takes a guidance that is drawn, and that its sampler takes plain steps."""
        term = self.train.terms.distill
        if term is None:
            return
        if term.most_guidance is not None and family.no_guidance(start) is not None:
            problem = f"this {family.title} takes no guidance as a number"
            self.add("objective.distill.most_guidance", problem, f"{term.most_guidance:g}", "write guidance alone")
        file = self.model.diffusers_path / "scheduler" / "scheduler_config.json"
        if term.steps is not None and file.is_file():
            kind = read_config(file.parent, "scheduler").get("_class_name")
            if kind != _EULER:
                hint = "leave it out: guidance alone is distilled"
                problem = f"the model's sampler is {kind}, and only {_EULER} takes the steps that are learnt"
                self.add("objective.distill.steps", problem, str(term.steps), hint)

    def single_steps(self, family: Family) -> None:
        """Check that images are not drawn in one step by a scheduler with a last time, which has none for it."""
        train = self.train
        tables = {
            "reward": train.reward,
            "objective.distill": train.terms.distill,
            "sampling": train.sampling if train.sampling.images else None,
            "metrics": train.metrics,
        }
        keys = [key for key, table in tables.items() if table is not None and table.steps == 1]
        if not keys:
            return
        model = with_base_values(self.model)
        last = model.last_time
        file = model.diffusers_path / "scheduler" / "scheduler_config.json"
        if not family.files.writes_scheduler and file.is_file():
            last = read_config(file.parent, "scheduler").get("shift_terminal")
        for key in keys if last else ():
            self.add(f"{key}.steps", f"the scheduler's last time is {last:g}", "1", "write at least 2")

    def engines(self, family: Family) -> None:
        """Check that the family has the kernels and the pipeline stages that the config requires."""
        for key, remedy in (("fast", 'write fast = "auto"'), ("fp8", "write fp8 = false")):
            if family.fast_blocks is None and getattr(self.train, key) is True:
                self.add(key, f"{family.title} has no fast blocks", "true", remedy)
        stages = self.train.pipeline_stages
        if stages > 1 and not family.has_stages:
            hint = 'write pipeline_stages = 1, and parallel = "fsdp2" or zero_stage = 3 to shard the weights'
            self.add("pipeline_stages", f"{family.title} has no pipeline stages", stages, hint)
        if self.train.adapter is not None and not family.loads_adapters:
            hint = "train the weights: `sd3-light new finetune`, or remove [adapter]; freeze leaves some of them out"
            self.add("adapter", f"the stock pipeline of {family.title} loads no adapter", hint=hint)

    def init(self, family: Family) -> None:
        """Check that the folder in `init` contains a denoiser; the content of a file is checked with its size."""
        init = self.model.init
        key = "model.init"
        if init is None or init == "random" or init == self.model.diffusers_path or init.is_file():
            return
        if not init.is_dir():
            self.add(key, "no such folder", init, 'give a folder with a denoiser, a single file, or "random"')
            return
        folder = denoiser_folder(init)
        hint = f"give an export, a folder of {family.title} or its transformer folder"
        with self.user_errors_of(key):
            for part in pipeline_folder.missing_denoiser(folder):
                problem = f"the folder has no complete denoiser: {folder.relative_to(init) / part} is missing"
                self.add(key, problem, init, hint)

    def start(self, family: Family) -> WeightsStart | None:
        """Return the initial weights, or None; other checks report missing files."""
        if not family.checks.has_size(self.model):
            return None
        source = start_source(self.model)
        key = "model.size" if source is None else "model.init" if self.model.init else "model.diffusers_path"
        start = None
        with self.user_errors_of(key):
            start = family.weights.start(self.model)
        return start

    def adapter(self, family: Family, start: WeightsStart) -> None:
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
        with self.model_errors_of("adapter.target_modules", hint="see docs/start/finetune.md for names and patterns"):
            family.cost(start, self.model).adapter_parameters(adapter)

    def training_adapter(self, family: Family, start: WeightsStart) -> None:
        """Check that `model.training_adapter` is a LoRA of the denoiser."""
        file = self.model.training_adapter
        key = "model.training_adapter"
        if file is None:
            return
        if not file.exists():
            self.add(key, "no such file or folder", file)
            return
        if start.source is None:
            self.add(key, "these weights start at random, and it is for a trained model", hint="remove it")
            return
        from sd3_light.export.lycoris_file import read_any_adapter  # imports torch
        from sd3_light.model.training_adapter import require_fitting

        with self.user_errors_of(key, file):
            modules = read_any_adapter(file, names=family.files.adapters).modules
            require_fitting(family.weights.unread(start)[0], modules)

    # --- the data -----------------------------------------------------------------------------

    def sources(self, dataset: DatasetConfig) -> None:
        """Check that the paths of a dataset TOML exist, can be read and are of the right kind."""
        for index, directory in enumerate(dataset.directories):
            for key, problem, path in _path_problems(directory):
                self.add(f"directory[{index}].{key}", problem, path, PATH_HINT, file=str(dataset.path))

    def buckets(self, dataset: DatasetConfig) -> None:
        """Check that no bucket is larger than the denoiser's position table, and that sides are whole tokens."""
        for index, directory in enumerate(dataset.directories):
            key = f"directory[{index}].{'size_buckets' if directory.size_buckets else 'resolutions'}"
            sizes = [(bucket.width, bucket.height) for bucket in buckets_for(directory)]
            smaller = "choose smaller resolutions, or narrower ratios (min_ar, max_ar)"
            other = f"write side_step = {self.step}" if directory.enable_ar_bucket else "choose other sizes"
            self._sides(key, sizes, (smaller, other), file=str(dataset.path))

    def _sides(self, key: str, sizes: Sequence[Resolution], hints: tuple[str, str], **more: str) -> None:
        """Check that the denoiser has positions for all sizes, and that their sides are whole tokens."""
        limit = self.largest_side or math.inf
        smaller, other = hints
        if wide := [f"{width}x{height}" for width, height in sizes if max(width, height) > limit]:
            self.add(key, f"the denoiser's position table ends at {limit} px", ", ".join(wide), smaller, **more)
        if uneven := [f"{width}x{height}" for width, height in sizes if width % self.step or height % self.step]:
            problem = f"the model needs sides that are multiples of {self.step}"
            self.add(key, problem, ", ".join(uneven), other, **more)

    def continued_values(self) -> None:
        """Check the scheduler of continued weights, and negative prompts against the text they were trained with."""
        key = "model.init" if self.model.init else "model.diffusers_path"
        if not self.model.continues_weights or any(fault.key == key for fault in self.faults):
            return
        with self.user_errors_of(key):
            text = with_base_values(self.model).uncond_text
            faults = negative_prompts(self.train, text or "zero") if self.model.uncond_text is None else ()
            self.add_all(faults)

    def sampling(self) -> None:
        """Check that no sample image is larger than the denoiser's position table."""
        settings = self.train.sampling
        sizes = {"sampling.size": settings.size}
        sizes |= {f"sampling.image[{index}].size": image.size for index, image in enumerate(settings.image)}
        for key, size in sizes.items():
            if size is not None:
                self._sides(key, [size], ("choose a smaller size", "choose another size"))

    def sampled_frames(self, family: Family) -> None:
        """Check that the family draws clips of the requested length."""
        frames = self.train.sampling.frames
        step = family.frame_step(self.model.diffusers_path)
        if frames is None or frames == 1:
            return
        if step is None:
            self.add("sampling.frames", f"{family.title} draws images only", frames, "remove it")
        elif (frames - 1) % step:
            below = frames - (frames - 1) % step
            problem = f"clips of {family.title} have {step}·n + 1 frames"
            self.add("sampling.frames", problem, frames, f"write {below} or {below + step}")

    def sampled_references(self, family: Family) -> None:
        """Check that sample images name files, as many as the family sees."""
        needed = family.reference_count(self.model)
        if self.train.sampling.prompts and family.texts_see_references:
            problem = f"{family.title} draws from images, and these prompts have none"
            self.add("sampling.prompts", problem, hint="write [[sampling.image]] with prompt and references")
        for index, image in enumerate(self.train.sampling.image):
            key = f"sampling.image[{index}].references"
            count = len(image.references)
            if count != needed and (count or family.texts_see_references):
                problem = f"{family.title} sees {needed} image(s) beside the text"
                self.add(key, problem, count, f"name {needed} file(s)" if needed else "remove it")
            for path in image.references:
                if not path.is_file():
                    self.add(key, "no such file", str(path), PATH_HINT)

    def references(self, dataset: DatasetConfig) -> None:
        """Check that every directory has as many reference images as the family sees."""
        if self.family is None:
            return
        needed = self.family.reference_count(self.model)
        if not needed and self.family.texts_see_references:
            problem = f"{self.family.title} edits images, and must know how many it sees"
            self.add("model.references", problem, needed, "write model.references = 1, or more")
        for index, directory in enumerate(dataset.directories):
            count = len(directory.references)
            if directory.flip and self.family.texts_see_references:
                problem = f"{self.family.title} encodes texts with references as they are, not mirrored"
                self.add(f"directory[{index}].flip", problem, hint="remove it", file=str(dataset.path))
            if count == needed:
                continue
            key = f"directory[{index}].references"
            file = str(dataset.path)
            if not needed:
                remedy = "write model.references, or remove it" if self.family.sets_references else "remove it"
                self.add(key, f"{self.family.title} sees no image beside the text", count, remedy, file=file)
            else:
                problem = f"{self.family.title} sees {needed} image(s) beside the text, and this names {count}"
                self.add(key, problem, hint='write references = ["FOLDER"], with the names of the images', file=file)

    def clips(self, dataset: DatasetConfig) -> None:
        """Check that the family allows the lengths of clips, and that videos can be decoded."""
        with_clips = [directory for directory in dataset.directories if directory.clip_lengths]
        if self.family is None or not with_clips:
            return
        if not has_av() and (clip := first_clip(with_clips)):
            hint = "run `pip install 'sd3-light[video]'`"
            problem = f"{clip} is decoded by PyAV, which is not installed"
            self.add("frames", problem, hint=hint, file=str(dataset.path))
        with self.model_errors_of("model.diffusers_path"):
            step = self.family.frame_step(self.model.diffusers_path)
            self.faults += clip_faults(dataset, step, self.family.title)

    def metrics(self) -> None:
        """Check the dataset TOML and the folder of [metrics]."""
        table = self.train.metrics
        if table is None:
            return
        self._model_folder("metrics.features", table.features, "of a CLIP or vision model")
        directories, faults = load_directories(table.dataset)
        self.faults += faults
        dataset = DatasetConfig(table.dataset, table.dataset.with_suffix(".cache"), directories)
        self.sources(dataset)
        self.buckets(dataset)

    def reward(self) -> None:
        """Check the prompts of [reward], and that their score is there."""
        table = self.train.reward
        if table is None:
            return
        if self.family is not None and self.family.media == "video":
            self.add("reward", f"{self.family.title} draws clips, and rewards are of images", hint="remove it")
        prompts: tuple[str, ...] = ()
        with self.user_errors_of("reward.prompts"):
            prompts = read_prompts(table.prompts)
        if 0 < len(prompts) < table.prompts_per_draw:
            hint = f"write {len(prompts)} or less, or add prompts"
            self.add("reward.prompts_per_draw", f"there are {len(prompts)} prompts", table.prompts_per_draw, hint)
        if table.score == WORLD:
            for prompt in prompts:
                with self.user_errors_of("reward.prompts"):
                    parse_caption(prompt)
        elif isinstance(table.score, Path):
            self._model_folder("reward.score", table.score, "of a CLIP model")
        elif table.score != PYTHON:
            with self.user_errors_of("reward.score"):
                require_marked(table.score)

    def _model_folder(self, key: str, folder: Path, kind: str) -> None:
        """Check that there is a model of features."""
        if any((place / "config.json").is_file() for place in (folder, folder / pipeline_folder.JUDGE)):
            return
        self.add(
            key, "is not a model folder (no config.json)", folder, f"give a folder of `sd3-light parts`, or {kind}"
        )

    # --- outputs and memory -------------------------------------------------------------------

    def outputs(self) -> None:
        """Check that output folders can be created, and that the protocols of URLs are available."""
        train = self.train
        datasets = self.loaded.eval_datasets.values()
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
    """Yield key, problem and place of every source of a directory that is missing, of another kind or unreadable."""
    sources: tuple[tuple[str, DataLocation | None, Callable[[Path], bool], str], ...] = (
        ("path", directory.path, _is_source, "neither a folder nor a .tar or .parquet file"),
        ("mask_path", directory.mask_path, Path.is_dir, "not a folder (use default_mask_file for one mask for all)"),
        ("default_mask_file", directory.default_mask_file, Path.is_file, "not a file"),
        ("rejected", directory.rejected, Path.is_dir, "not a folder"),
        ("exclude", directory.exclude, Path.is_file, "not a file"),
        *(("references", folder, Path.is_dir, "not a folder") for folder in directory.references),
    )
    for key, source, is_of_kind, other_kind in sources:
        if isinstance(source, str):
            problem = _url_problem(source)
        elif source is None:
            continue
        elif not source.exists():
            problem = "no such file or folder"
        elif not is_of_kind(source):
            problem = other_kind
        elif not os.access(source, os.R_OK | (os.X_OK if source.is_dir() else 0)):
            problem = "not readable by this user"
        else:
            problem = _exclusions_problem(source) if key == "exclude" else None
        if problem is not None:
            yield key, problem, source


def _is_source(path: Path) -> bool:
    return path.is_dir() or (path.is_file() and path.suffix.lower() in CONTAINERS)


def _exclusions_problem(file: Path) -> str | None:
    """Return why a list of excluded samples cannot be read; None if it can."""
    try:
        read_exclusions(file)
    except UserError as error:
        return str(error).removeprefix("exclude: ")
    return None


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


def first_clip(directories: Iterable[DirectoryConfig]) -> Path | None:
    """Return a video below the folders of directories that needs PyAV; those inside containers are not seen."""
    folders = (directory.path for directory in directories)
    files = (file for folder in folders if isinstance(folder, Path) for file in folder.rglob("*"))
    return next((file for file in files if file.suffix.lower() in VIDEOS.suffixes - {".gif"}), None)
