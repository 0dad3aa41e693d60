"""The export stage: a proven diffusers folder from a run's checkpoint."""

from pathlib import Path

from diffusers import SD3Transformer2DModel

from sd3_light.checkpoint.state import EMA, WEIGHTS, Progress, of_kind
from sd3_light.checkpoint.store import newest_checkpoint, read_checkpoint
from sd3_light.config import load_config
from sd3_light.config.faults import UserError
from sd3_light.export.folder import write_folder
from sd3_light.training.light_sd3 import starting_transformer
from sd3_light.training.saver import export_spec, model_config, whole_state


def run(run_folder: Path, out: Path, checkpoint: Path | None = None, weights: str | None = None) -> Path:
    """Export the newest (or the given) checkpoint; ``weights`` is `ema` or `raw`, None for `ema` where there is one."""
    if weights not in (None, "ema", "raw"):
        raise UserError(f"--weights: {weights!r} is not known; use `ema` or `raw`")
    if out.exists():
        raise UserError(f"{out} exists already; choose another folder, nothing was changed")
    train = load_config(run_folder / "config.toml").train
    saved = checkpoint or newest_checkpoint(run_folder / "checkpoints")
    if saved is None:
        raise UserError(f"{run_folder} has no checkpoint yet; exports need one")
    tensors, facts = read_checkpoint(saved)
    averaged = of_kind(tensors, EMA)
    if weights == "ema" and not averaged:
        raise UserError(f"{saved} has no running average; use --weights raw")
    chosen = weights or ("ema" if averaged else "raw")
    transformer: SD3Transformer2DModel = starting_transformer(train.model, train.seed)
    spec = export_spec(train, model_config(transformer), chosen, Progress(**facts["progress"]))
    trained = averaged if chosen == "ema" else of_kind(tensors, WEIGHTS)
    return write_folder(out, whole_state(transformer, trained), spec)
