"""The export verb: a verified diffusers folder, single file or adapter, from a run's checkpoint or snapshots."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from sd3_light.checkpoint.progress import EMA, Progress, track_kind
from sd3_light.checkpoint.reading import Checkpoint, open_checkpoint
from sd3_light.checkpoint.store import incomplete_checkpoints
from sd3_light.config import TrainConfig, load_config
from sd3_light.config.faults import UserError
from sd3_light.core.family import Family
from sd3_light.core.files import Contents, is_single_file
from sd3_light.core.model import HEADS
from sd3_light.core.registry import family_of, single_files, starting_weights
from sd3_light.core.start import WeightsStart
from sd3_light.engines.protocol import PARAM_KIND
from sd3_light.export.adapter_folder import write_adapter
from sd3_light.export.background_saves import FOLDERS, SNAPSHOT, newest_usable
from sd3_light.export.chosen import refuse_script_run
from sd3_light.export.diffusers_folder import WeightsOnDemand, write_folder
from sd3_light.export.export_spec import ExportError, ExportSpec
from sd3_light.export.hub import Target, check_push
from sd3_light.export.model_facts import ModelFacts
from sd3_light.export.of_run import RAW, adapter_spec, export_spec, model_config, whole_state
from sd3_light.export.proof import ProofError
from sd3_light.files import refuse_existing, scratch_folder, write_errors
from sd3_light.optim.post_hoc_ema import Snapshot, combine, parse_snapshots, reachable_widths, solve
from sd3_light.runlog import info
from sd3_light.system import release_freed_memory


@dataclass(frozen=True)
class _Weights:
    """Trained weights, their description, the progress of training, and what was stored about the model."""

    trained: Mapping[str, Tensor]
    description: str
    progress: Progress
    model: ModelFacts


def run(
    run_folder: Path,
    out: Path,
    checkpoint: Path | None = None,
    weights: str | None = None,
    ema_length: float | None = None,
    push_to_hub: Target | None = None,
    contents: Contents | None = None,
) -> Path:
    """Export ``checkpoint``, by default the newest, to ``out``; return ``out``.

    ``weights`` is `raw`, `ema` or the name of another average; by default `ema` if it exists. With ``ema_length`` (a
    width sigma_rel), an average of that length is rebuilt from the run's snapshots, as of the newest one (not after the
    step of ``checkpoint``). An ``out`` that ends in .safetensors becomes a single file with ``contents``; the folder it
    is made from is verified and then removed. What would fail when ``out`` is uploaded to ``push_to_hub`` is reported
    before any work.
    """
    if ema_length is not None and weights is not None:
        raise UserError("--ema-length and --weights exclude each other; use one of them")
    release_freed_memory()
    refuse_existing(out)
    _check_options(out, contents)
    refuse_script_run(run_folder)
    train = load_config(run_folder / "config.toml").train
    if push_to_hub is not None:
        if is_single_file(out) and train.adapter is None:
            raise UserError(f"--push-to-hub uploads a folder, but {out} is a single file; pass the name of a folder")
        check_push(push_to_hub)
    if is_single_file(out) and train.adapter is None:
        single_files(family_of(train.model), out)  # reports a family without them before any work
    if ema_length is None:
        weights_to_export = _from_checkpoint(_checkpoint_of(run_folder, checkpoint), weights)
    else:
        weights_to_export = _from_snapshots(run_folder / FOLDERS[SNAPSHOT], checkpoint, ema_length)
    try:
        _write(train, weights_to_export, run_folder, out, contents)
    except ExportError as error:
        if isinstance(error.__cause__, UserError):  # it names its own remedy
            raise UserError(f"{out} was not written: {error}") from error
        raise UserError(f"{run_folder}: {error}; does its config.toml belong to these weights?") from error
    except ProofError as error:
        raise UserError(f"{out} was not written: {error}. The run is unchanged") from error
    return out


def _check_options(out: Path, contents: Contents | None) -> None:
    """Raise a UserError for options that do not fit together, before any work."""
    if contents not in (None, Contents()) and not is_single_file(out):
        raise UserError(
            f"--vae, --text-encoders and --pad-blocks are for single files, but {out} names a folder; use a name that "
            "ends in .safetensors"
        )


def _write(train: TrainConfig, weights: _Weights, run_folder: Path, out: Path, contents: Contents | None) -> None:
    """Write the full model, or the adapter of a run that trains one."""
    if train.adapter is not None:
        _write_adapter(train, weights, run_folder, out)
        return
    spec, state = _full_model(train, weights, run_folder)
    with write_errors(out):
        if not is_single_file(out):
            write_folder(out, state, spec, replace=False, owned=True)
            return
        with scratch_folder(out) as scratch:
            folder = write_folder(scratch / out.stem, state, spec, owned=True)
            for note in single_files(spec.family, out).write(folder, out, contents or Contents()).notes:
                info(f"note: {note}")


def _full_model(train: TrainConfig, weights: _Weights, run_folder: Path) -> tuple[ExportSpec, Mapping[str, Tensor]]:
    """Return the spec of a full model and its weights, which are read on demand; the start is not kept in memory."""
    start = weights.model.keep_table(starting_weights(train.model))
    transformer, read = _starting_model(family_of(train.model), start, train.seed)
    config = model_config(transformer, weights.model)
    spec = export_spec(train, config, weights.description, weights.progress, run_folder, weights.model)
    return spec, whole_state(transformer, read, weights.trained, train.freeze)


def _starting_model(family: Family, start: WeightsStart, seed: int) -> tuple[nn.Module, Callable[[str], Tensor]]:
    """Return the denoiser that the run started from, and a function that returns one of its weights.

    Weights of a folder or a file are read when they are asked for.
    """
    if start.source is None:
        transformer = family.weights.load(start, seed)
        return transformer, transformer.state_dict().__getitem__
    transformer, stored = family.weights.unread(start)
    tables = {name: buffer.dtype for name, buffer in transformer.named_buffers()}
    return transformer, lambda name: stored[name].load().to(tables.get(name, torch.float32))


def _write_adapter(train: TrainConfig, weights: _Weights, run_folder: Path, out: Path) -> None:
    """Write a folder with the adapter's file, card and proof, or only the file."""
    start = starting_weights(train.model)
    spec = adapter_spec(train, start, weights.description, weights.progress, run_folder, weights.model)
    with write_errors(out):
        if not is_single_file(out):
            write_adapter(out, dict(weights.trained), spec)
            return
        with scratch_folder(out) as scratch:
            os.replace(write_adapter(scratch / out.stem, dict(weights.trained), spec) / spec.file, out)


# --- from a checkpoint ------------------------------------------------------------------------


def _checkpoint_of(run_folder: Path, path: Path | None) -> Checkpoint:
    path = path or newest_usable(run_folder, "restore one from a copy")
    if path is None:
        raise UserError(f"{run_folder} has no checkpoint to export yet")
    return open_checkpoint(path)


def _from_checkpoint(saved: Checkpoint, weights: str | None) -> _Weights:
    available = [RAW, *_tracks(saved)]
    name = weights or (EMA if EMA in available else RAW)
    if name not in available:
        raise UserError(f"--weights: {saved.path} has no {name!r}; it has {', '.join(available)}")
    kind = PARAM_KIND if name == RAW else track_kind(name)
    names = (tensor for tensor in saved.names(kind) if not tensor.startswith(HEADS))
    trained = WeightsOnDemand({tensor: partial(_in_float32, saved, f"{kind}/{tensor}") for tensor in names})
    return _Weights(trained, name, saved.progress, ModelFacts.of(saved))


def _tracks(saved: Checkpoint) -> list[str]:
    """Return the names of the averages in a checkpoint, the main one first."""
    kinds = dict.fromkeys(sorted(name.partition("/")[0] for name in saved.shapes))
    return [kind.removeprefix(f"{EMA}.") for kind in kinds if kind == EMA or kind.startswith(f"{EMA}.")]


# --- from snapshots ---------------------------------------------------------------------------


def _from_snapshots(folder: Path, checkpoint: Path | None, length: float) -> _Weights:
    last_step = None if checkpoint is None else open_checkpoint(checkpoint).progress.step
    folders = sorted({*folder.glob("step-*")} - {*incomplete_checkpoints(folder)})
    checkpoints = [open_checkpoint(path) for path in folders]
    pairs = [(snapshot, saved) for saved in checkpoints for snapshot in parse_snapshots(saved.facts)]
    pairs = [(snapshot, saved) for snapshot, saved in pairs if last_step is None or snapshot.step <= last_step]
    if not pairs:
        when = "" if last_step is None else f" up to step {last_step}"
        raise UserError(
            f"{folder} has no snapshots{when} to rebuild an average from; train with a [[ema.track]] that has "
            "power_width, or export an existing average with --weights"
        )
    snapshots = [snapshot for snapshot, _ in pairs]
    newest = max(snapshots, key=lambda snapshot: snapshot.time)
    newest_saved = next(saved for snapshot, saved in pairs if snapshot is newest)
    _require_reachable(snapshots, newest.time, length)
    fit = solve(snapshots, newest.time, length)
    info(
        f"average of length {length:g} at step {newest.time} from {len(snapshots)} snapshots: its profile deviates by "
        f"{fit.mismatch:.1%}, rounding adds {fit.noise:.2%} of the weights"
    )
    names = newest_saved.names(track_kind(newest.track))
    trained = dict(combine(fit, [_reader(*pair) for pair in pairs], names))
    progress = Progress(**newest_saved.facts.get("progress", {"step": newest.step}))
    return _Weights(trained, f"average of length {length:g}", progress, ModelFacts.of(newest_saved))


def _require_reachable(snapshots: list[Snapshot], time: int, length: float) -> None:
    span = reachable_widths(snapshots, time)
    if span is None:
        raise UserError("--ema-length: this run has too few snapshots to rebuild an average")
    if not span[0] <= length <= span[1]:
        raise UserError(
            f"--ema-length {length:g}: the {len(snapshots)} snapshots of this run cover lengths from {span[0]:.3f} to "
            f"{span[1]:.3f}; choose one in this range"
        )


def _reader(snapshot: Snapshot, saved: Checkpoint) -> Callable[[str], Tensor]:
    kind = track_kind(snapshot.track)
    return lambda name: _in_float32(saved, f"{kind}/{name}")


def _in_float32(saved: Checkpoint, name: str) -> Tensor:
    """Read a weight that may be stored in bfloat16."""
    return saved.tensor(name).float()
