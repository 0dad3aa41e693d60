"""The model that a path names: a diffusers folder, an export of a run, or an adapter's folder with its base model."""

from dataclasses import dataclass
from pathlib import Path

from sd3_light.checkpoint.store import step_of
from sd3_light.config.faults import UserError
from sd3_light.config.hub_ids import require_model_path
from sd3_light.config.toml_file import read_toml
from sd3_light.export.background_saves import EXPORT, FOLDERS
from sd3_light.export.best import best_name, validation_losses
from sd3_light.export.lora_stack import Lora, adapter_file
from sd3_light.runlog import info, read_log


@dataclass(frozen=True)
class ChosenModel:
    """A complete diffusers folder, the adapter to apply to it, and the folder that says how texts were encoded."""

    folder: Path
    loras: tuple[Lora, ...]
    text_facts: Path


def choose_model(path: Path, best: bool = False) -> ChosenModel:
    """Return the model at ``path``; of a run folder its newest export, or its best one."""
    require_model_path(path)
    is_model = (path / "model_index.json").is_file()
    if (path / FOLDERS[EXPORT]).is_dir() or ((path / "log.jsonl").is_file() and not is_model):
        path = best_export(path) if best else exports_of(path)[-1]
    elif best:
        raise UserError(f"--best chooses among the exports of a run, and {path} is not a run folder; leave it out")
    file = None if (path / "model_index.json").is_file() else adapter_file(path)
    return ChosenModel(path, (), path) if file is None else ChosenModel(_base_of(path), (Lora(file),), path)


def exports_of(run: Path) -> list[Path]:
    """Return the exports of a run, the oldest first; a run without one is a UserError."""
    exports = sorted((run / FOLDERS[EXPORT]).glob("step-*"))
    if not exports:
        refuse_script_run(run)
        raise UserError(f"{run} has no export yet; write one with `sd3-light export {run} OUT`")
    return exports


def refuse_script_run(run: Path) -> None:
    """Raise a UserError if a folder is the run of a script, which has no exports; it names the newest saved file."""
    saved = [] if (run / "config.toml").exists() else list(run.glob("*-*.safetensors"))
    if saved:
        file = max(saved, key=lambda path: ("." not in path.stem, path.stat().st_mtime))  # others are extra averages
        raise UserError(
            f"{run} is the run of a script, whose logger saved {file.name} there; use that file: a LoRA with "
            f"`sd3-light sample MODEL PROMPT --lora {file}`, other weights in the script itself"
        )


def best_export(run: Path) -> Path:
    """Return the export that is marked as the best; otherwise the one whose weights had the lowest validation loss,
    averaged over the evaluation sets."""
    name = best_name(run / FOLDERS[EXPORT])
    if name is not None and (run / FOLDERS[EXPORT] / name).is_dir():
        info(f"{name} is the best export by [metrics]")
        return run / FOLDERS[EXPORT] / name
    events = list(read_log(run / "log.jsonl"))
    weights = {event["step"]: event["weights"] for event in events if event["event"] == EXPORT}
    losses = validation_losses(events, weights)
    scored = {path: losses[step] for path in exports_of(run) if (step := step_of(path)) in losses}
    if not scored:
        raise UserError(
            f"--best: no export of {run} was evaluated at its step with a finite loss; write eval_datasets (or "
            "validation = true in its dataset TOML) and eval_every_n_steps, or [metrics], or leave the option out to "
            "use the newest export"
        )
    best = min(scored, key=lambda path: scored[path])
    info(f"{best.name} has the lowest validation loss of {len(scored)} exports: {scored[best]:.4f}")
    return best


def _base_of(adapter: Path) -> Path:
    """Return the model folder that an adapter was trained on, from the config in its folder."""
    raw, _ = read_toml(adapter / "config.toml") if (adapter / "config.toml").is_file() else ({}, [])
    model = (raw or {}).get("model")
    named = (model.get("init") or model.get("diffusers_path")) if isinstance(model, dict) else None
    if isinstance(named, str) and (Path(named) / "model_index.json").is_file():
        return Path(named)
    of = f" of {named}" if isinstance(named, str) else ""
    raise UserError(
        f"{adapter} is an adapter{of}, and no complete model folder is there; pass the model, and the adapter with "
        f"--lora {adapter}"
    )
