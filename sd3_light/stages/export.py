"""The export stage: a proven diffusers folder, single file or adapter, from a run's checkpoint or snapshots."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.checkpoint.progress import EMA, Progress, track_kind
from sd3_light.checkpoint.store import Checkpoint, incomplete_checkpoints, newest_checkpoint, open_checkpoint
from sd3_light.config import TrainConfig, load_config
from sd3_light.config.faults import UserError
from sd3_light.engines.protocol import PARAM_KIND
from sd3_light.export.adapter_folder import write_adapter
from sd3_light.export.diffusers_folder import ExportError, write_folder
from sd3_light.export.hub import check_push, push
from sd3_light.export.single_file import Contents, is_single_file, write_single_file
from sd3_light.files import refuse_existing, scratch_folder, write_errors
from sd3_light.model.start import where_weights_start
from sd3_light.optim.post_hoc_ema import Snapshot, combine, parse_snapshots, reachable_widths, solve
from sd3_light.runlog import info
from sd3_light.training.saver import adapter_spec, export_spec, model_config, whole_state
from sd3_light.training.sd3 import starting_transformer

RAW = "raw"
SNAPSHOTS = "ema"


@dataclass(frozen=True)
class _Chosen:
    """Trained weights, what they are, and how far training had come."""

    trained: dict[str, Tensor]
    words: str
    progress: Progress


def run(
    run_folder: Path,
    out: Path,
    checkpoint: Path | None = None,
    weights: str | None = None,
    ema_length: float | None = None,
    push_to_hub: str | None = None,
    contents: Contents | None = None,
) -> Path:
    """Export from the newest (or the given) checkpoint: ``weights`` is `raw`, `ema` or another average's name, None for
    `ema` where there is one.

    With ``ema_length`` (a width sigma_rel) an average of that length is rebuilt from the run's snapshots instead, as of
    the newest one (at the step of ``checkpoint`` or before it, where that is given). ``push_to_hub`` names a repository
    of the Hugging Face hub that gets the export as well. An ``out`` that ends in .safetensors is a single file, with
    ``contents``; the folder it is made of is proven and then removed.
    """
    if ema_length is not None and weights is not None:
        raise UserError("--ema-length and --weights exclude each other: a rebuilt average is neither; keep one")
    refuse_existing(out)
    _check_form(out, contents, push_to_hub)
    train = load_config(run_folder / "config.toml").train
    if ema_length is None:
        chosen = _from_checkpoint(_checkpoint_of(run_folder, checkpoint), weights)
    else:
        chosen = _from_snapshots(run_folder / SNAPSHOTS, checkpoint, ema_length)
    try:
        _write(train, chosen, run_folder, out, contents)
    except ExportError as fault:
        raise UserError(f"{run_folder}: {fault}; is its config.toml the one of these weights?") from fault
    if push_to_hub is not None:
        info(f"pushed to {push(out, push_to_hub)}")
    return out


def _check_form(out: Path, contents: Contents | None, push_to_hub: str | None) -> None:
    """Refuse wishes that do not go together, now and not after an hour."""
    if push_to_hub is not None:
        if is_single_file(out):
            raise UserError(f"--push-to-hub uploads a folder, and {out} is a single file; give the name of a folder")
        check_push(push_to_hub)
    if contents not in (None, Contents()) and not is_single_file(out):
        raise UserError(
            f"--vae, --text-encoders and --pad-blocks are for single files, and {out} is a folder's name; give one "
            "that ends in .safetensors"
        )


def _write(train: TrainConfig, chosen: _Chosen, run_folder: Path, out: Path, contents: Contents | None) -> None:
    """The whole model, or of a run that trains an adapter the adapter's file."""
    if train.adapter is not None:
        _write_adapter(train, chosen, run_folder, out)
        return
    transformer: SD3Transformer2DModel = starting_transformer(where_weights_start(train.model), train.seed)
    spec = export_spec(train, model_config(transformer), chosen.words, chosen.progress, run_folder)
    state = whole_state(transformer, chosen.trained, train.freeze)
    with write_errors(out):
        if not is_single_file(out):
            write_folder(out, state, spec, replace=False)
            return
        with scratch_folder(out) as place:  # gone at the end, whatever happens
            folder = write_folder(place / out.stem, state, spec)
            for note in write_single_file(folder, out, *(contents or Contents())).notes:
                info(f"note: {note}")


def _write_adapter(train: TrainConfig, chosen: _Chosen, run_folder: Path, out: Path) -> None:
    """A folder with the adapter's file, card and proof, or the file alone."""
    spec = adapter_spec(train, where_weights_start(train.model), chosen.words, chosen.progress, run_folder)
    with write_errors(out):
        if not is_single_file(out):
            write_adapter(out, chosen.trained, spec)
            return
        with scratch_folder(out) as place:
            os.replace(write_adapter(place / out.stem, chosen.trained, spec) / spec.file, out)


# --- from a checkpoint ------------------------------------------------------------------------


def _checkpoint_of(run_folder: Path, given: Path | None) -> Checkpoint:
    path = given or newest_checkpoint(run_folder / "checkpoints")
    if path is None:
        raise UserError(f"{run_folder} has no checkpoint yet; exports need one")
    return open_checkpoint(path)


def _from_checkpoint(saved: Checkpoint, weights: str | None) -> _Chosen:
    known = [RAW, *_tracks(saved)]
    chosen = weights or (EMA if EMA in known else RAW)
    if chosen not in known:
        raise UserError(f"--weights: {saved.path} has no {chosen!r}; it has {', '.join(known)}")
    kind = PARAM_KIND if chosen == RAW else track_kind(chosen)
    trained = {name: saved.tensor(f"{kind}/{name}") for name in saved.names(kind)}
    return _Chosen(trained, chosen, Progress(**saved.facts["progress"]))


def _tracks(saved: Checkpoint) -> list[str]:
    """Names of the averages in a checkpoint, the main one first."""
    kinds = dict.fromkeys(sorted(name.partition("/")[0] for name in saved.shapes))
    return [kind.removeprefix(f"{EMA}.") for kind in kinds if kind == EMA or kind.startswith(f"{EMA}.")]


# --- from snapshots ---------------------------------------------------------------------------


def _from_snapshots(folder: Path, checkpoint: Path | None, length: float) -> _Chosen:
    until = None if checkpoint is None else int(open_checkpoint(checkpoint).facts["progress"]["step"])
    taken = [open_checkpoint(path) for path in sorted({*folder.glob("step-*")} - {*incomplete_checkpoints(folder)})]
    found = [(snapshot, saved) for saved in taken for snapshot in parse_snapshots(saved.facts)]
    found = [(snapshot, saved) for snapshot, saved in found if until is None or snapshot.step <= until]
    if not found:
        when = "" if until is None else f" up to step {until}"
        raise UserError(
            f"{folder} has no snapshots{when} to rebuild an average from; train with a [[ema.track]] that has "
            "power_width, or export an average that exists with --weights"
        )
    snapshots = [snapshot for snapshot, _ in found]
    newest = max(snapshots, key=lambda snapshot: snapshot.time)
    last = next(saved for snapshot, saved in found if snapshot is newest)
    _require_reachable(snapshots, newest.time, length)
    fit = solve(snapshots, newest.time, length)
    info(
        f"average of length {length:g} at step {newest.time} from {len(snapshots)} snapshots: its profile is off by "
        f"{fit.mismatch:.1%}, rounding amounts to {fit.noise:.2%} of the weights"
    )
    trained = dict(combine(fit, [_reader(*one) for one in found], last.names(track_kind(newest.track))))
    progress = Progress(**last.facts.get("progress", {"step": newest.step}))
    return _Chosen(trained, f"average of length {length:g}", progress)


def _require_reachable(snapshots: list[Snapshot], time: int, length: float) -> None:
    span = reachable_widths(snapshots, time)
    if span is None:
        raise UserError("--ema-length: the snapshots of this run are too few to rebuild any average from")
    if not span[0] <= length <= span[1]:
        raise UserError(
            f"--ema-length {length:g}: the {len(snapshots)} snapshots of this run give lengths from {span[0]:.3f} to "
            f"{span[1]:.3f}; choose one of these"
        )


def _reader(snapshot: Snapshot, saved: Checkpoint) -> Callable[[str], Tensor]:
    kind = track_kind(snapshot.track)
    return lambda name: saved.tensor(f"{kind}/{name}")
