"""A small training project: images of the demo world and two TOML files. The fixtures are in tests/conftest.py."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:  # torch and diffusers are imported only by the tests that need them
    from sd3_light.cache.verb import CacheReport
    from sd3_light.checkpoint.progress import Progress
    from sd3_light.config import LoadedConfig
    from sd3_light.train.verb import Resume

NUM_IMAGES = 40
TRAIN_TOML = """
output_dir = "run"
dataset = "data.toml"
cache_dir = "cache"
seed = 3
max_steps = 4
micro_batch_size_per_gpu = 4
checkpoint_every_n_steps = 2
keep_last_n_checkpoints = 0
save_dtype = "float32"
caching_batch_size = 8
caching_num_workers = 1
num_dataloader_workers = 0
sd3_shard_size = 8

[model]
train_type = "sd3_light_pretrain"
diffusers_path = "{model}"
init = "random"
size = "tiny2"
t5_max_length = 16
dtype = "float32"
uncond_text = "empty"
enable_uncond_text_dropout = true

[optimizer]
lr = 1e-3

[ema]
enable = true
decay = 0.9
update_every = 1
"""
DATA_TOML = """
size_buckets = [[64, 64], [80, 48], [48, 80]]

[[directory]]
path = "images"
"""


class Project:
    """A user's folder: `train.toml`, `data.toml`, `images/`, and the caches and runs written beside them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.train_toml, self.data_toml = folder / "train.toml", folder / "data.toml"
        self.images, self.cache, self.run = folder / "images", folder / "cache", folder / "run"

    def load(self, *overrides: str) -> "LoadedConfig":
        """Load the config with `key=VALUE` overrides."""
        from sd3_light.config import load_config

        return load_config(self.train_toml, overrides)

    def data(self, text: str) -> None:
        """Replace the dataset TOML."""
        self.data_toml.write_text(text, encoding="utf-8")

    def hold_out(self, count: int) -> None:
        """Write images that are not trained on, and the dataset `eval.toml`."""
        from sd3_light.world import write_dataset

        write_dataset(self.folder / "held_out", count, seed=2, held_out=True)
        (self.folder / "eval.toml").write_text('resolutions = [64]\n[[directory]]\npath = "held_out"\n')

    def build_cache(self, *overrides: str, **flags: bool) -> "list[CacheReport]":
        """Run the cache stage in this process; the flags are those of `CacheOptions`."""
        from sd3_light.cache import verb as cache

        with quick_caching():
            return cache.run(self.load(*overrides), options=cache.CacheOptions(**flags))

    def train(self, *overrides: str, resume: "Resume | None" = None) -> "Progress":
        """Cache what is missing and train, in this process."""
        from sd3_light.engines import Launch
        from sd3_light.journeys import cache_then_train

        with quick_caching():
            return cache_then_train(self.load(*overrides), Launch(), resume=resume)

    def events(self, kind: str, run: str = "run") -> list[dict[str, Any]]:
        from sd3_light.runlog import read_log

        return [event for event in read_log(self.folder / run / "log.jsonl") if event["event"] == kind]

    def losses(self, run: str = "run") -> dict[int, float]:
        return {event["step"]: event["loss"] for event in self.events("step", run)}

    def copy(self, target: Path, without: Iterable[str] = ()) -> "Project":
        """Copy the project, except names that match ``without``; the model folder is shared."""
        shutil.copytree(self.folder, target, ignore=shutil.ignore_patterns(*without))
        return Project(target, self.model)


@contextmanager
def quick_caching() -> Iterator[None]:
    """Let the stages of this process share loaded encoders and tokenizers, and print how well the VAE reconstructs one
    image instead of eight.

    Loading takes longer than encoding the project's images. A loader that a test has replaced stays replaced.
    """
    from sd3_light.cache import advice
    from sd3_light.encoding import half_vae, image_encoders
    from sd3_light.families.sd3 import encoders as frozen_parts
    from sd3_light.families.sd3 import text

    of_texts, of_images = (text.load_text_model, text.load_tokenizer), (half_vae.load_encoding_vae,)
    with ExitStack() as patches:
        patches.enter_context(patch.dict(advice._RECONSTRUCTED, cpu=1))
        for module, loaders in ((frozen_parts, of_texts), (image_encoders, of_images)):
            for loader in loaders:
                if getattr(module, loader.__name__) is loader:
                    patches.enter_context(patch.object(module, loader.__name__, partial(_load_once, loader)))
        yield


@contextmanager
def without_proofs() -> Iterator[None]:
    """Skip the proofs of exports, which take seconds."""
    with (
        patch("sd3_light.export.diffusers_folder.prove", return_value={}),
        patch("sd3_light.export.adapter_folder.prove_adapter", return_value={}),
    ):
        yield


_LOADED: dict[Any, Any] = {}


def _load_once(loader: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Return what the loader returned for these arguments and the same files before, or call it."""
    (model,) = (argument for argument in arguments if isinstance(argument, Path))
    files = [(path, path.stat()) for path in sorted(model.rglob("*"))]
    state = tuple((path, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in files)
    key = (loader, arguments, tuple(keywords.items()), state)
    if key not in _LOADED:
        _LOADED[key] = loader(*arguments, **keywords)
    return _LOADED[key]


def with_nan(model: Path, target: Path, part: str) -> Path:
    """Copy a model folder; weights of ``part`` in the copy are NaN."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, target)
    (file,) = (target / part).glob("*.safetensors")
    tensors = load_file(file)
    for name in tensors:
        if "norm" in name and name.endswith("weight"):
            tensors[name][0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    return target
