"""Resuming from a checkpoint: which one, with which settings, and what is loaded from it."""

import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sd3_light.checkpoint.index import INDEX, damaged
from sd3_light.checkpoint.progress import Progress, track_kind
from sd3_light.checkpoint.reading import Checkpoint, open_checkpoint
from sd3_light.checkpoint.store import (
    abandoned_checkpoints,
    clean_leftovers,
    mark_abandoned_after,
    newest_checkpoint,
    restore_replaced,
    step_of,
)
from sd3_light.config import LoadedConfig, ModelConfig, TrainConfig, UserError, resolved_toml
from sd3_light.config.toml_file import read_toml
from sd3_light.core.model import HEADS
from sd3_light.core.start import WeightsStart
from sd3_light.data.manifest import MANIFEST
from sd3_light.data.order import Order
from sd3_light.data.shard_table import ShardEntry
from sd3_light.engines import Engine, Launch
from sd3_light.engines.feed import make_order, open_cache, order_facts, planned_order
from sd3_light.engines.protocol import PARAM_KIND
from sd3_light.export.background_saves import CHECKPOINT, FOLDERS, checkpoint_to_resume, newest_usable
from sd3_light.export.model_facts import ModelFacts
from sd3_light.model.base_values import with_base_values
from sd3_light.optim.ema import Averages
from sd3_light.runlog import info

_DAMAGED_REMEDY = (
    "restore one from a copy, resume from another with --resume-from PATH, or start from the beginning with --restart"
)
_MOST_CHANGES = 8
_RATE_KEYS = ("lr_scheduler", "warmup_steps", "lr_step_size", "lr_step_gamma")


@dataclass(frozen=True)
class Resume:
    """The options `--resume`, `--resume-from`, `--reset-*` and `--restart`.

    Without ``checkpoint`` the newest is used. ``restart`` starts from the beginning and sets all checkpoints aside.
    """

    checkpoint: Path | None = None
    reset_dataloader: bool = False
    reset_optimizer: bool = False
    reset_optimizer_params: bool = False
    restart: bool = False


def require_start(loaded: LoadedConfig, resume: Resume | None) -> None:
    """Raise if the run folder holds a run already, before hours are spent on the cache."""
    if resume is None:
        find_checkpoint(loaded.train.output_dir, resume)


def find_checkpoint(output_dir: Path, resume: Resume | None) -> Path | None:
    """Return the checkpoint to resume from; None for a new run."""
    if resume is None:
        newest = newest_usable(output_dir, f"{_DAMAGED_REMEDY}, or choose another output_dir")
        if newest is not None:
            raise UserError(
                f"{output_dir} holds a run ({newest.name}); continue it with --resume, start again with "
                "--restart, or choose another output_dir"
            )
        return None
    if resume.restart:
        return None
    if resume.checkpoint is not None:
        newest = newest_checkpoint(output_dir / FOLDERS[CHECKPOINT])
        if newest is not None and not is_own_checkpoint(resume.checkpoint, output_dir):
            raise UserError(
                f"{output_dir} holds another run ({newest.name}) than {resume.checkpoint}; choose another "
                "output_dir, or name one of its checkpoints"
            )
        return resume.checkpoint
    return checkpoint_to_resume(output_dir, _DAMAGED_REMEDY)


def choose_checkpoint(output_dir: Path, resume: Resume | None) -> Path | None:
    """Return `find_checkpoint`; clean up interrupted saves. Only the main process calls it."""
    kinds = (*FOLDERS.values(), "samples")
    cleaned = [output_dir / kind / name for kind in kinds for name in restore_replaced(output_dir / kind)]
    checkpoint = find_checkpoint(output_dir, resume)  # raises before anything is deleted
    cleaned += [output_dir / kind / name for kind in kinds for name in clean_leftovers(output_dir / kind)]
    for path in cleaned:
        info(f"cleaned up {path}: an interrupted save")
    own = checkpoint if checkpoint is not None and is_own_checkpoint(checkpoint, output_dir) else None
    step = 0 if own is None else step_of(own)
    for kind in FOLDERS.values():
        chosen = own if kind == FOLDERS[CHECKPOINT] else None
        for name in mark_abandoned_after(step, output_dir / kind, chosen):
            info(f"set aside {kind}/{name}: it is of later steps than this run resumes from")
    _report_abandoned(output_dir)
    return checkpoint


def _report_abandoned(output_dir: Path) -> None:
    """Print how much the abandoned saves take and how to delete them."""
    paths = [path for kind in FOLDERS.values() for path in abandoned_checkpoints(output_dir / kind)]
    if paths:
        size = sum(file.stat().st_size for path in paths for file in path.rglob("*") if file.is_file())
        info(
            f"{len(paths)} abandoned checkpoints, snapshots and exports take {size / 1e9:.2f} GB. The checkpoints of "
            "these are deleted as this run passes them: move what you want to keep. If you need none of them: "
            f"rm -r {shlex.quote(str(output_dir))}/*/abandoned-step-*"
        )


def is_own_checkpoint(checkpoint: Path, output_dir: Path) -> bool:
    """Whether a checkpoint belongs to the run in this folder."""
    return checkpoint.resolve().parent == (output_dir / FOLDERS[CHECKPOINT]).resolve()


def rate_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the optimizer's settings as checkpoints store them; the dtype of weights is the config's on resume."""
    table = config.optimizer.model_dump(mode="json", exclude={"weight_dtype"})
    return {"optimizer": table, **{key: getattr(config, key) for key in _RATE_KEYS}}


def settings_in_force(config: TrainConfig, resumed: Checkpoint | None, resume: Resume | None) -> TrainConfig:
    """Return the config with the checkpoint's optimizer settings, unless a --reset-* flag selects the config's."""
    if resumed is None or resume is None or resume.reset_optimizer:
        return config
    try:
        return _with_settings(config, resumed, resume, resumed.table("settings"))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(resumed.path, INDEX, f"its settings are not those of an optimizer ({error!r:.80})") from error


def _with_settings(config: TrainConfig, resumed: Checkpoint, resume: Resume, old: dict[str, Any]) -> TrainConfig:
    new = rate_settings(config)
    if old["optimizer"]["type"] != new["optimizer"]["type"]:
        raise UserError(
            f"{resumed.path} was trained with optimizer.type = {old['optimizer']['type']!r}, the config says "
            f"{new['optimizer']['type']!r}; write that type, or drop its state with --reset-optimizer"
        )
    differing = [f"{key} = {old[key]!r}" for key in _RATE_KEYS if old[key] != new[key]]
    table = old["optimizer"]
    differing += [f"optimizer.{key} = {table[key]!r}" for key in table if table[key] != new["optimizer"].get(key)]
    if resume.reset_optimizer_params or not differing:
        return config
    info(f"using the checkpoint's {', '.join(differing)}; --reset-optimizer-params takes the config's")
    optimizer = type(config.optimizer).model_validate({**config.optimizer.model_dump(mode="json"), **table})
    return config.model_copy(update={"optimizer": optimizer, **{key: old[key] for key in _RATE_KEYS}})


def progress_in_force(resumed: Checkpoint | None, resume: Resume | None) -> Progress:
    """Return the counters with which the run begins or continues."""
    progress = Progress() if resumed is None else resumed.progress
    return replace(progress, position=0) if resume is not None and resume.reset_dataloader else progress


def keep_position_table(start: WeightsStart, resumed: Checkpoint | None) -> WeightsStart:
    """Return where the weights start, with the position table of the run that is resumed."""
    if resumed is None:
        return start
    kept = ModelFacts.of(resumed).keep_table(start)
    if kept != start:
        info(f"using the checkpoint's model.position_step = {kept.size.position_step:.4g}: a run keeps its table")
    return kept


def with_position_step(config: TrainConfig, start: WeightsStart) -> TrainConfig:
    """Return the config with the step of the position table in use; tables of trained weights are in the weights."""
    if start.source is not None:
        return config
    step = {"position_step": start.size.position_step}
    shape = None if config.model.shape is None else config.model.shape.model_copy(update=step)
    return config.model_copy(update={"model": config.model.model_copy(update={**step, "shape": shape})})


def with_model_values(config: TrainConfig, resumed: Checkpoint | None) -> TrainConfig:
    """Return the config with the shift and `uncond_text` in use: given, of the resumed run, or of continued weights."""
    model = with_base_values(config.model)
    if resumed is not None:
        kept = ModelFacts.of(resumed).keep_values(config.model)
        differing = [_shift_of(kept)] if _shift_of(kept) != _shift_of(model) else []
        differing += [f'model.uncond_text = "{kept.uncond_text}"'] if kept.uncond_text != model.uncond_text else []
        if differing:
            info(f"using the checkpoint's {', '.join(differing)}: a run keeps the values that it began with")
        model = kept
    return config.model_copy(update={"model": model})


def config_in_force(
    config: TrainConfig, start: WeightsStart, resumed: Checkpoint | None, resume: Resume | None
) -> TrainConfig:
    """Return the config with the values that the run keeps, see `with_model_values` and `settings_in_force`."""
    config = with_model_values(with_position_step(config, start), resumed)
    return settings_in_force(config, resumed, resume)


@dataclass(frozen=True)
class ResumeReview:
    """What `--resume` makes of a config that was changed: keys as `changed_keys` has them, and why it is refused."""

    checkpoint: Path
    applied: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    refusal: str = ""


def review_changes(loaded: LoadedConfig, start: WeightsStart) -> ResumeReview | None:
    """Return what `--resume` makes of a config; None without a checkpoint. Nothing is written.

    Weights of another shape are noticed only by the run itself.
    """
    resume = Resume()
    path = find_checkpoint(loaded.train.output_dir, resume)
    if path is None:
        return None
    saved = open_checkpoint(path)
    written = [each for each in changed_keys(loaded, saved) if " = not set (was " not in each]
    try:
        config = config_in_force(loaded.train, keep_position_table(start, saved), saved, resume)
        folder = loaded.dataset.cache_dir
        if isinstance(folder, Path) and (folder / MANIFEST).is_file():
            data = open_cache(loaded.dataset, config, Launch(), "train" if loaded.dataset.is_divided else "all")
            _require_order(saved, make_order(data, loaded, Launch()), f"; the config has {_listed(written)}")
    except UserError as error:
        return ResumeReview(path, kept=tuple(written), refusal=str(error))
    applied = changed_keys(replace(loaded, train=config), saved)
    return ResumeReview(path, tuple(applied), tuple(each for each in written if each not in applied))


def _shift_of(model: ModelConfig) -> str:
    """Return the timestep shift of a [model] table as a line of TOML."""
    for name in ("flux_shift", "sqrt_shift"):
        if getattr(model, name):
            return f"model.{name} = true"
    return f"model.shift = {model.shift or 1.0:g}"


def changed_keys(loaded: LoadedConfig, resumed: Checkpoint) -> list[str]:
    """Return the keys whose values differ from the `config.toml` of the resumed run, as `key = new (was old)`."""
    table, _ = read_toml(resumed.path.parent.parent / "config.toml")
    if table is None:  # the checkpoint was copied without its run
        return []
    before = _flat(table)
    now = _flat(tomllib.loads(resolved_toml(loaded)))
    keys = (key for key in sorted({*before, *now}) if before.get(key) != now.get(key) and key != "output_dir")
    return [f"{key} = {_value(now, key)} (was {_value(before, key)})" for key in keys]


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _value(table: Mapping[str, Any], key: str) -> str:
    return f"{table[key]!r:.80}" if key in table else "not set"


def _listed(changes: Sequence[str]) -> str:
    more = f" and {len(changes) - _MOST_CHANGES} more" if len(changes) > _MOST_CHANGES else ""
    return ", ".join(changes[:_MOST_CHANGES]) + more


def load_checkpoint(
    saved: Checkpoint, engine: Engine, averages: Averages, order: Order, resume: Resume, changes: Sequence[str] = ()
) -> tuple[Progress, Mapping[str, Any] | None]:
    """Load a checkpoint into engine and averages; return the progress, and the log's window that the run continues.

    ``changes`` are the `changed_keys`: an error that refuses them names them, and the others are reported.
    """
    changed = f"; the config has {_listed(changes)}" if changes else ""
    _require_model(saved, engine, changed)
    if not resume.reset_dataloader:
        _require_order(saved, order, changed)
    if changes:
        info(f"the config has changed since the checkpoint: {_listed(changes)}")
    saved.load_into(engine.weight_pieces() if resume.reset_optimizer else engine.pieces())
    load_averages(saved, engine, averages)
    return progress_in_force(saved, resume), None if resume.reset_dataloader else saved.facts["window"]


def _require_order(saved: Checkpoint, order: Order, changed: str) -> None:
    now = order_facts(order)
    if saved.table("order") != now:
        raise _other_order(saved, now, changed)


def load_averages(saved: Checkpoint, engine: Engine, averages: Averages) -> None:
    """Load the averages of a checkpoint; a new one starts from the weights, which are loaded already."""
    for name, track in averages.tracks.items():
        if saved.names(track_kind(name)):
            saved.load_into(engine.like_weights(track_kind(name), track.shadow))
            continue
        info(f"{saved.path} has no average {name!r}: it starts from the current weights")
        for key, tensor in track.shadow.items():
            tensor.copy_(engine.weights[key])


def _require_model(saved: Checkpoint, engine: Engine, changed: str) -> None:
    shapes = {name: saved.shapes[f"{PARAM_KIND}/{name}"] for name in saved.names(PARAM_KIND)}
    differing = sorted(name for name in {*shapes, *engine.shapes} if shapes.get(name) != engine.shapes.get(name))[:3]
    if differing and all(name.startswith(HEADS) for name in differing):
        raise UserError(f"{saved.path} has other heads (differs in {differing}); restore the objective{changed}")
    if differing:
        raise UserError(f"{saved.path} is of another model (differs in {differing}); check [model] and freeze{changed}")


def order_review(
    loaded: LoadedConfig, launch: Launch, resume: Resume | None
) -> Callable[[Sequence[ShardEntry], bool], None] | None:
    """Return a function that raises if a run cannot resume on a cache with these shards; None for a new run.

    If their counts are not known, it raises only if the order differs whichever images are rejected.
    """
    if resume is None or resume.restart or resume.reset_dataloader:
        return None

    def review(shards: Sequence[ShardEntry], are_known: bool) -> None:
        path = resume.checkpoint or newest_checkpoint(loaded.train.output_dir / FOLDERS[CHECKPOINT])
        if path is None:
            return
        saved = open_checkpoint(path)
        share = launch.data_launch(loaded.train.pipeline_stages)
        before = saved.table("order")
        now = order_facts(planned_order(shards, loaded, share))
        if before != now and (are_known or _must_differ(before, now)):
            changes = [change for change in changed_keys(loaded, saved) if not change.startswith("model.")]
            raise _other_order(saved, now, f"; the config has {_listed(changes)}" if changes else "")

    return review


def _must_differ(before: Mapping[str, Any], most: Mapping[str, Any]) -> bool:
    """Return whether an order differs from that of a run even if images of ``most`` are rejected."""
    old = before["buckets"]
    new = most["buckets"]
    if before["seed"] != most["seed"] or len(new) < len(old):
        return True
    if len(new) > len(old):
        return False
    settings_differ = any(was[:2] != now[:2] for was, now in zip(old, new, strict=True))
    return settings_differ or any(was[2] > now[2] for was, now in zip(old, new, strict=True))


def _other_order(saved: Checkpoint, now: Mapping[str, Any], changed: str) -> UserError:
    before = saved.table("order")
    return UserError(
        f"{saved.path} was trained on another order of data ({_difference(before, now)}); {_remedy(before, now)}, or "
        f"pass --reset-dataloader{changed}"
    )


def _remedy(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say how to restore an order."""
    if before["seed"] != now["seed"]:
        return f"write seed = {before['seed']}"
    old = before["buckets"]
    new = now["buckets"]
    missing = sum(bucket[2] for bucket in old) - sum(bucket[2] for bucket in new)
    if missing:
        kind = "restore the {} missing" if missing > 0 else "remove the {} new"
        return f"{kind.format(f'{abs(missing):,}')} {'sample' if abs(missing) == 1 else 'samples'}"
    if any(was[0] != is_now[0] for was, is_now in zip(old, new, strict=False)):
        return "restore the global batch"
    if any(was[1] != is_now[1] for was, is_now in zip(old, new, strict=False)):
        return f"write shuffle_window = {old[0][1]}"
    return "restore the data"


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the first difference between two orders."""
    if before["seed"] != now["seed"]:
        return f"seed {before['seed']}, now {now['seed']}"
    if len(before["buckets"]) != len(now["buckets"]):
        return f"{len(before['buckets'])} buckets, now {len(now['buckets'])}"
    names = ("global batch", "shuffle_window", "samples per epoch", "batches per epoch", "shards")
    for number, pair in enumerate(zip(before["buckets"], now["buckets"], strict=True)):
        for name, old, new in zip(names, *pair, strict=True):
            if old != new:
                return f"{name} of bucket {number}: {old}, now {new}"
    return "unknown"
