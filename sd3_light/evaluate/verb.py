"""The evaluate stage: a model's validation loss on a config's evaluation sets, and its score on the demo's prompts."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import diffusers
import torch

from sd3_light.assets import DEMO
from sd3_light.config import DirectoryConfig, LoadedConfig
from sd3_light.config.faults import UserError
from sd3_light.config.load_dataset import load_directories
from sd3_light.config.toml_file import read_toml
from sd3_light.core.cost import Layout
from sd3_light.core.registry import family_of
from sd3_light.engines import Launch
from sd3_light.engines.blocks import decide_blocks
from sd3_light.engines.errors import explain_runtime_errors
from sd3_light.engines.processes import start_process_group
from sd3_light.engines.torch import TorchEngine
from sd3_light.evaluate.composition import CompositionScore, ScoreOptions, score
from sd3_light.evaluate.validation_loss import Evaluator
from sd3_light.export.chosen import choose_model
from sd3_light.export.export_spec import write_json
from sd3_light.export.lora_merge import merge_adapters
from sd3_light.export.lora_stack import Lora
from sd3_light.inputs import read_limited
from sd3_light.model.base_values import with_base_values
from sd3_light.model.loading import load_diffusers_model
from sd3_light.runlog import progress
from sd3_light.sample.phases import open_with_adapters
from sd3_light.sources.access import exists
from sd3_light.sources.records import Record
from sd3_light.sources.scan import scan
from sd3_light.world import draw_prompts
from sd3_light.world.captions import parse_caption

_HASHES = "hashes.json"
_CAPTIONS_TRIED = 8


def require_eval_sets(loaded: LoadedConfig) -> None:
    """Raise a UserError if the config names no evaluation set and holds nothing out, or its loss needs a teacher."""
    if not loaded.evaluates:
        raise UserError(
            f"{loaded.path} has no eval_datasets, and its dataset no validation = true; add one of them, or evaluate "
            "without --config"
        )
    if loaded.train.terms.distill is not None:
        raise UserError(
            f"{loaded.path} distils a teacher, and its validation loss is the distance from it, which training "
            "computes; evaluate the images: without --config, or with --against"
        )


def validation_losses(loaded: LoadedConfig, model: Path, launch: Launch | None = None) -> dict[str, dict[str, float]]:
    """Return the losses of each evaluation set by name, as training computes them; their caches must exist."""
    launch = launch or Launch()
    require_eval_sets(loaded)
    # nothing is trained, so compiling never pays, and not every GPU supports fp8
    update = {"fp8": False, "compile": loaded.train.compile is True, "model": with_base_values(loaded.train.model)}
    config = loaded.train.model_copy(update=update)
    chosen = choose_model(model)
    model = chosen.folder
    if not (model / "transformer" / "config.json").is_file():
        raise UserError(f"{model} is not a diffusers folder (no transformer/config.json); pass an export")
    family = family_of(config.model)
    denoiser = load_diffusers_model(getattr(diffusers, family.denoiser), model / "transformer", torch.float32)
    merge_adapters(denoiser, chosen.loras)
    device = launch.device()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels run on the current device
    groups = start_process_group(launch, device, config.dist_timeout_sec)
    start = family.weights.start(config.model)
    blocks = decide_blocks(
        config, family.cost(start, config.model), denoiser, Layout(launch.world_size), device, groups
    )
    engine = TorchEngine(family.training.model(denoiser, config, blocks.kind == "fast"), config, launch, device)
    preparer = family.training.preparer(config, start, None)
    with explain_runtime_errors("lower eval_micro_batch_size_per_gpu"):
        losses = dict(Evaluator(loaded, launch, engine, preparer).losses())
    if not losses:
        raise UserError(f"{loaded.dataset.path}: too few images are different to hold one out; add eval_datasets")
    return losses


def require_demo_world(model: Path) -> None:
    """Raise unless the model is the shipped one, or the captions that it was trained on are of the demo world."""
    chosen = choose_model(model)
    if not (chosen.folder / "model_index.json").is_file():
        return  # reported when it is opened
    folder = chosen.text_facts
    raw, _ = read_toml(folder / "config.toml") if (folder / "config.toml").is_file() else (None, [])
    dataset = (raw or {}).get("dataset")
    if (folder / _HASHES).is_file() and read_limited(folder / _HASHES) == read_limited(DEMO / _HASHES):
        return
    if isinstance(dataset, str) and Path(dataset).is_file():
        directories, faults = load_directories(Path(dataset))
        if directories and not faults and all(map(_shows_demo_world, directories)):
            return
    raise UserError(
        f"{model} is not known to be trained on the demo's images, whose shapes and colours this score judges; pass "
        "--against DATA.toml --features FOLDER to compare it with true images, --config TRAIN.toml for the validation "
        "loss of its evaluation sets, or --demo to score these prompts anyway"
    )


def _shows_demo_world(directory: DirectoryConfig) -> bool:
    """Return whether the first captions of a directory are of the demo world; a missing directory shows nothing."""
    if not exists(directory.path):
        return False
    records = (entry for entry in scan(directory, 0) if isinstance(entry, Record))
    captions = [caption for record in islice(records, _CAPTIONS_TRIED) for caption in record.captions]
    try:
        return bool([parse_caption(caption.removeprefix(directory.caption_prefix)) for caption in captions])
    except UserError:
        return False


def run(
    model: Path,
    count: int = 96,
    held_out: bool = True,
    language: str = "mixed",
    options: ScoreOptions = ScoreOptions(),  # noqa: B008 - frozen
    out: Path | None = None,
    loras: Sequence[Lora] = (),
) -> CompositionScore:
    """Return the score on ``count`` prompts of the demo world, by default combinations that training data lacks."""
    chosen = choose_model(model)
    pipe, policy = open_with_adapters(chosen, loras, Launch().device())
    prompts = draw_prompts(count, options.seed, held_out, language=language)
    with progress("score", count, "images") as bar:
        result = score(pipe, prompts, policy, options, bar.set_done)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, result.as_dict())
    return result
