"""The evaluate stage: a model's validation loss on a config's evaluation sets, and its score on the demo's prompts."""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel

from sd3_light.config import DEFAULT_GUIDANCE, LoadedConfig
from sd3_light.config.faults import UserError
from sd3_light.encoders.vae import LatentScale
from sd3_light.engines import Launch
from sd3_light.engines.processes import start_process_group
from sd3_light.engines.torch import TorchEngine
from sd3_light.export.export_spec import write_json
from sd3_light.export.lora_merge import add_adapters
from sd3_light.export.open_pipeline import open_pipeline
from sd3_light.metrics.composition import CompositionScore, score
from sd3_light.model.part_configs import load_part
from sd3_light.model.start import where_weights_start
from sd3_light.runlog import progress
from sd3_light.sampling.lora_stack import Lora
from sd3_light.training.errors import explain_runtime_errors
from sd3_light.training.evaluation import Evaluator
from sd3_light.training.module import SD3TrainingModule, why_stock_blocks
from sd3_light.training.sd3 import InputPreparer
from sd3_light.world import draw_prompts


def validation_losses(loaded: LoadedConfig, model: Path, launch: Launch | None = None) -> dict[str, dict[str, float]]:
    """Return the losses of each evaluation set by name, as training computes them; their caches must exist."""
    launch = launch or Launch()
    config = loaded.train.model_copy(update={"fp8": False})  # nothing is trained, and not every GPU supports it
    if not loaded.eval_datasets:
        raise UserError(f"{loaded.path} has no eval_datasets; add one, or evaluate without --config")
    if not (model / "transformer" / "config.json").is_file():
        raise UserError(f"{model} is not a diffusers folder (no transformer/config.json); pass an export")
    denoiser = load_part(SD3Transformer2DModel, model / "transformer", dtype=torch.float32)
    device = launch.device()
    start_process_group(launch, device, config.dist_timeout_sec)
    fast = why_stock_blocks(config, where_weights_start(config.model).size, denoiser, device.type, launch.world) is None
    engine = TorchEngine(SD3TrainingModule(denoiser, config, fast), config, launch, device)
    preparer = InputPreparer(config.seed, config.model, LatentScale.of_folder(config.model.diffusers_path), None)
    with explain_runtime_errors("lower eval_micro_batch_size_per_gpu"):
        return dict(Evaluator(loaded, launch, engine, preparer).losses())


def run(
    model: Path,
    count: int = 96,
    held_out: bool = True,
    language: str = "mixed",
    steps: int = 20,
    guidance: float = DEFAULT_GUIDANCE,
    seed: int = 0,
    batch: int = 16,
    out: Path | None = None,
    loras: Sequence[Lora] = (),
) -> CompositionScore:
    """Return the score on ``count`` prompts of the demo world, by default combinations that training data lacks."""
    pipe, policy = open_pipeline(model, Launch().device())
    add_adapters(pipe, loras)
    prompts = draw_prompts(count, seed, held_out, language=language)
    with progress("score", count, "images") as bar:
        result = score(pipe, prompts, policy, steps, guidance, seed, batch, on_progress=bar.set_done)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, result.as_dict())
    return result
