"""What continued weights bring along: the timestep shift of their scheduler, and the text of unconditional samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sd3_light.config import ModelConfig, TrainConfig, UserError
from sd3_light.config.schema_tables import MetricsConfig, SamplingConfig
from sd3_light.core.drawing import stated_drawing
from sd3_light.core.registry import family_of
from sd3_light.core.sampling import UNSTATED, OwnDrawing
from sd3_light.core.start import start_source
from sd3_light.model.part_configs import FACTS_FILE, check_config, read_config, read_json, single_file_metadata

# as in the config
_SMALLEST = 0.001
_LARGEST = 1000.0


class ShiftLine(NamedTuple):
    """A timestep shift exp(mu) that grows with the image tokens: mu is linear between two points."""

    base_shift: float = 0.5
    max_shift: float = 1.15
    base_tokens: int = 256
    max_tokens: int = 4096


FLUX_LINE = ShiftLine()
_LINE_KEYS = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")


@dataclass(frozen=True)
class _Base:
    """The scheduler of continued weights, where it was found, their text without a prompt, and how they are drawn."""

    scheduler: Mapping[str, Any]
    where: Path
    uncond_text: str
    drawing: OwnDrawing

    @property
    def last_time(self) -> float | None:
        """The time of the last call of sampling, if the scheduler sets it."""
        return self.scheduler.get("shift_terminal")

    @property
    def is_dynamic(self) -> bool:
        return bool(self.scheduler.get("use_dynamic_shifting"))

    @property
    def shift(self) -> float | None:
        """The constant shift; None if the scheduler has another one, or none is known."""
        shift = self.scheduler.get("shift", self.scheduler.get("flow_shift"))
        if shift is None or self.is_dynamic:
            return None
        if not _SMALLEST <= shift <= _LARGEST:
            raise UserError(f"{self.where}: its scheduler has shift {shift:g}; write model.shift, or download it again")
        return float(shift)

    @property
    def line(self) -> ShiftLine:
        """The line of a shift by resolution; absent numbers are those of diffusers."""
        numbers = zip(_LINE_KEYS, FLUX_LINE, strict=True)
        line = ShiftLine(*(self.scheduler.get(key, usual) for key, usual in numbers))
        if line.base_tokens == line.max_tokens:
            raise UserError(f"{self.where}: its scheduler shifts between equal numbers of tokens; download it again")
        return line


def with_base_values(model: ModelConfig) -> ModelConfig:
    """Return the [model] table with shift, `last_time` and `uncond_text` of the weights that the run continues.

    Given values stay. Random weights have no shift, and zeros in place of text.
    """
    base = _read_base(model)
    update: dict[str, Any] = {}
    if model.uncond_text is None:
        update["uncond_text"] = "zero" if base is None else base.uncond_text
    if base is not None and not _has_shift(model):
        update |= {"flux_shift": True} if base.is_dynamic else {"shift": base.shift}
    if base is not None and model.last_time is None and family_of(model).files.writes_scheduler:
        update["last_time"] = base.last_time
    return model.model_copy(update=update)


def own_last_time(model: ModelConfig) -> float | None:
    """Return the time of the last call of sampling if it is not that of the weights that the run continues."""
    base = _read_base(model)
    same = base is not None and (base.last_time or 0.0) == (model.last_time or 0.0)
    return None if same else model.last_time


def drawing_of_run(config: TrainConfig, unguided: float | None, usual: float | None = None) -> OwnDrawing:
    """Return the steps and the guidance of a run's model, where its kind does not say it: distilled, or continued ones.

    ``unguided`` is the largest guidance that is none. It is None for a denoiser that takes guidance as a number: that
    of its teacher if this one was not guided, or the ``usual`` one if it is among those that a distilled model learnt.
    """
    base = _read_base(config.model)
    stated = UNSTATED if base is None else base.drawing
    term = config.terms.distill
    if term is None:
        return stated
    guidance = unguided
    if guidance is None and not term.is_guided:
        guidance = 1.0 if config.model.guidance is None else config.model.guidance
    elif guidance is None:
        most = term.guidance if term.most_guidance is None else term.most_guidance
        guidance = min(max(term.guidance if usual is None else usual, term.guidance), most)
    return OwnDrawing(term.steps or stated.steps, guidance)


def unlearnt_steps(config: TrainConfig) -> str | None:
    """Return that a run takes the few steps from the model that it continues, and what to do; None if it does not."""
    base = _read_base(config.model)
    steps = None if base is None else base.drawing.steps
    if steps is None or config.model.training_adapter is not None or config.terms.teacher is not None:
        return None
    return (
        f"the model is made for {steps} steps, which training towards images unlearns; write model.training_adapter "
        "(docs/reference/distill.md)"
    )


def drawn_as(drawing: OwnDrawing, config: TrainConfig) -> TrainConfig:
    """Return a config with these steps and this guidance in place of absent ones, for samples and metrics."""
    given = {"steps": drawing.steps, "guidance": drawing.guidance}
    stated = {key: value for key, value in given.items() if value is not None}

    def absent(table: SamplingConfig | MetricsConfig) -> dict[str, Any]:
        return {key: value for key, value in stated.items() if key not in table.model_fields_set}

    metrics = config.metrics
    tables = {
        "sampling": config.sampling.model_copy(update=absent(config.sampling)),
        "metrics": None if metrics is None else metrics.model_copy(update=absent(metrics)),
    }
    return config.model_copy(update=tables)


def few_step_values(config: TrainConfig) -> TrainConfig:
    """Return a config whose sampler spreads the calls of a distilled model over all times, unless it says otherwise.

    Diffusers' own last call is at about 0.001, where there is nothing left to do.
    """
    term = config.terms.distill
    if term is None or term.steps is None or config.model.last_time is not None:
        return config
    last = 1 / term.steps if term.steps > 1 else 0.0
    return config.model_copy(update={"model": config.model.model_copy(update={"last_time": last})})


def shift_line(model: ModelConfig) -> ShiftLine:
    """Return the numbers of `flux_shift`: of the scheduler of continued weights if it shifts by resolution."""
    base = _read_base(model)
    return base.line if base is not None and base.is_dynamic else FLUX_LINE


def kept_scheduler(model: ModelConfig) -> dict[str, Any] | None:
    """Return the scheduler config of continued weights if it shifts by resolution and [model] sets no other shift."""
    base = None if _has_shift(model) and not model.flux_shift else _read_base(model)
    return dict(base.scheduler) if base is not None and base.is_dynamic else None


def other_shift(model: ModelConfig) -> str | None:
    """Return one line if a run trains with another shift than the weights that it continues; None otherwise."""
    base = _read_base(model)
    if base is None:
        return None
    if base.is_dynamic:
        theirs = "shifts by resolution"
        remedy = "write flux_shift = true to train with such a shift"
        is_same = model.flux_shift
    elif base.shift is None:
        return None
    else:
        theirs = f"has shift {base.shift:g}"
        remedy = f"leave it out to train and sample with {base.shift:g}"
        is_same = not (model.flux_shift or model.sqrt_shift) and (model.shift or 1.0) == base.shift
        if model.flux_shift and not family_of(model).files.writes_scheduler:
            remedy += f": only training changes, images and exports keep {base.shift:g}"
    own = f"model.shift = {model.shift or 1.0:g}"
    for name in ("flux_shift", "sqrt_shift"):
        own = f"model.{name} = true" if getattr(model, name) else own
    return None if is_same else f"{own}, but the scheduler of {base.where} {theirs}; {remedy}"


def _has_shift(model: ModelConfig) -> bool:
    return model.shift is not None or model.flux_shift or model.sqrt_shift


def _read_base(model: ModelConfig) -> _Base | None:
    """Return what is known about the weights that a run continues; None for random ones.

    A denoiser without its pipeline, or a single file of another program, gets the scheduler of `diffusers_path`.
    """
    source = start_source(model)
    if source is None or not model.continues_weights:
        return None
    own = source.parent if source.name == "transformer" else source
    metadata = single_file_metadata(source) if source.is_file() else {}
    facts = metadata.get("facts", {})
    if (own / FACTS_FILE).is_file():
        facts = read_json(own / FACTS_FILE)
    text = _uncond_text(facts)
    drawing = stated_drawing(facts if isinstance(facts, dict) else {}, own)
    scheduler = metadata.get("scheduler")
    if isinstance(scheduler, dict) and scheduler:
        check_config(scheduler, "scheduler", str(source))
        return _Base(scheduler, source, text, drawing)
    for folder in (own, model.diffusers_path):
        if (folder / "scheduler" / "scheduler_config.json").is_file():
            return _Base(read_config(folder / "scheduler", "scheduler"), folder, text, drawing)
    return _Base({}, own, text, drawing)


def _uncond_text(facts: Any) -> str:
    """Return the text of unconditional samples that a model of sd3-light states; that of stock guidance otherwise."""
    text = facts.get("text") if isinstance(facts, dict) else None
    return "zero" if isinstance(text, dict) and text.get("uncond_text") == "zero" else "empty"
