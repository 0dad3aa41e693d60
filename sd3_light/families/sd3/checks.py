"""What `check` and `new` read in a folder of SD3: three text encoders, a VAE, a denoiser with a position table."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sd3_light.config import Fault, ModelConfig, ModelSize, TrainConfig, UserError
from sd3_light.config.cross_checks import text_recon_faults, token_problems
from sd3_light.core.checks import ModelChecks, ModelFact, model_fault
from sd3_light.core.start import WeightsStart, denoiser_folder, start_source
from sd3_light.families.sd3.positions import start_position_step
from sd3_light.families.sd3.start import configured_size, differences, folder_size
from sd3_light.model import folder as pipeline_folder
from sd3_light.sources.buckets import SIDE_STEP

_STEP_TOLERANCE = 0.01  # of a step that is read from a table in bfloat16
_LATENT_PIXELS = 8  # image pixels per latent pixel
_FOLDER = "model.diffusers_path"


class SD3Checks(ModelChecks):
    """See `ModelChecks`."""

    def folder_faults(self, model: ModelConfig) -> Iterator[Fault]:
        """See `ModelChecks.folder_faults`."""
        folder = model.diffusers_path
        if not folder.is_dir():
            hint = "give the diffusers folder of an SD3, or create one with `sd3-light init`"
            yield model_fault(_FOLDER, "no such folder", folder, hint)
            return
        try:
            if pipeline_folder.is_unfinished(folder):
                yield model_fault(
                    _FOLDER, "the folder is unfinished", folder, f"run `sd3-light parts DATA {folder}` again"
                )
                return
            for part in pipeline_folder.missing_parts(folder, transformer=start_source(model) == folder):
                yield model_fault(_FOLDER, f"the folder lacks {part}", folder, "download or copy the whole folder")
        except UserError as error:
            yield model_fault(_FOLDER, str(error))
        try:
            pipeline_folder.check_configs(folder)
        except UserError as error:
            yield model_fault(_FOLDER, str(error), folder)

    def has_size(self, model: ModelConfig) -> bool:
        """See `ModelChecks.has_size`."""
        source = start_source(model)
        if source is not None and not source.is_file() and not (denoiser_folder(source) / "config.json").is_file():
            return False
        return model.shape is None or _has_encoders(model)

    def encoder_faults(self, model: ModelConfig, start: WeightsStart | None) -> Iterator[Fault]:
        """See `ModelChecks.encoder_faults`; missing files are reported with the folder."""
        if not _has_encoders(model):
            return
        yield from _reported(_encoder_faults(model), _FOLDER, model.diffusers_path)
        if start is not None:
            with suppress(UserError):  # reported with the encoders
                yield from _width_faults(model, start)

    def key_faults(self, train: TrainConfig, start: WeightsStart) -> Iterator[Fault]:
        """See `ModelChecks.key_faults`."""
        size = start.size
        model = train.model
        yield from text_recon_faults(train, size.num_layers)
        if start.source is None:
            return
        for key, fields in token_problems(train, size.num_layers, size.pos_embed_max_size).items():
            yield Fault("", key, **fields)
        weights = f"the weights in {start.source}"
        hint = 'remove the key, or give init = "random"'
        if model.num_layers is not None and model.num_layers != size.num_layers:
            yield model_fault("model.num_layers", f"{weights} have {size.num_layers} layers", model.num_layers, hint)
        if model.qk_norm is not None and model.qk_norm != size.qk_norm:
            problem = f"{weights} {'have' if size.qk_norm else 'have no'} qk-norm"
            yield model_fault("model.qk_norm", problem, str(model.qk_norm).lower(), hint)
        yield from _reported(_position_faults(model, start, hint), "model.position_step")
        yield from _size_faults(model, start, hint)

    def largest_side(self, start: WeightsStart, model: ModelConfig) -> int:
        """See `ModelChecks.largest_side`."""
        return int(start.size.pos_embed_max_size) * SIDE_STEP

    def facts(self, start: WeightsStart) -> tuple[ModelFact, ...]:
        """See `ModelChecks.facts`."""
        step = start_position_step(start)
        origin = "of the size" if start.source is None else "in the weights"
        if step is None:
            meaning = f"the position table {origin} is not a table of sines and cosines"
            return (ModelFact("position step", "unknown", meaning),)
        meaning = f"radians between neighbouring tokens of the position table {origin}"
        return (ModelFact("position step", f"{step:.4g}", meaning, f"position step {step:.3g}"),)

    def trained_side(self, folder: Path) -> int:
        """See `ModelChecks.trained_side`."""
        return folder_size(denoiser_folder(folder)).sample_size * _LATENT_PIXELS

    def text_limit(self, folder: Path) -> int | None:
        """See `ModelChecks.text_limit`."""
        return pipeline_folder.tokenizer_length(folder / "tokenizer_3")


def _reported(faults: Iterator[Fault], key: str, value: object = None) -> Iterator[Fault]:
    """Yield the faults; a UserError among them is a fault of ``key``."""
    try:
        yield from faults
    except UserError as error:
        yield model_fault(key, str(error).removeprefix(f"{key}: "), value)


def _has_encoders(model: ModelConfig) -> bool:
    """Whether the configs of VAE and text encoders exist."""
    parts = ("vae", *pipeline_folder.TEXT_ENCODER_FOLDERS)
    return all((model.diffusers_path / part / "config.json").is_file() for part in parts)


def _encoder_faults(model: ModelConfig) -> Iterator[Fault]:
    folder = model.diffusers_path
    for problem in (*_latent_problems(folder), *_text_problems(folder, model.t5_max_length)):
        yield model_fault(_FOLDER, problem, folder)
    longest = pipeline_folder.tokenizer_length(folder / "tokenizer_3")
    if longest is not None and model.t5_max_length > longest:
        problem = f"tokenizer_3 accepts at most {longest} tokens"
        yield Fault("", "model.t5_max_length", problem, str(model.t5_max_length), allowed=f"1 to {longest}")


def _latent_problems(folder: Path) -> Iterator[str]:
    _, shrink = pipeline_folder.vae_shape(folder)
    if shrink * ModelSize.patch_size != SIDE_STEP:
        yield f"its VAE shrinks images {shrink} times, an SD3 VAE {SIDE_STEP // ModelSize.patch_size} times"


def _text_problems(folder: Path, t5_max_length: int) -> Iterator[str]:
    text = pipeline_folder.text_shape(folder, t5_max_length)
    positions = pipeline_folder.clip_positions(folder)
    if text.clip_tokens > positions:
        yield f"its tokenizer produces {text.clip_tokens} tokens and its CLIP encoders accept at most {positions}"
    if text.clip_width > text.t5_width:
        widths = f"{text.clip_l_width} + {text.clip_g_width}"
        yield f"its CLIP encoders together ({widths}) are wider than T5 ({text.t5_width})"


def _width_faults(model: ModelConfig, start: WeightsStart) -> Iterator[Fault]:
    hint = None
    if start.source is None:
        hint = "write [model.shape] instead of a size: it takes the widths of the folder, as in `sd3-light new icons`"
    for problem in _width_problems(model.diffusers_path, model.t5_max_length, start.size):
        yield model_fault(_FOLDER, problem, model.diffusers_path, hint)


def _width_problems(folder: Path, t5_max_length: int, size: ModelSize) -> Iterator[str]:
    """Yield what encoders and VAE return in another width than the denoiser needs."""
    text = pipeline_folder.text_shape(folder, t5_max_length)
    channels, _ = pipeline_folder.vae_shape(folder)
    if channels != size.latent_channels:
        yield f"its VAE has {channels} latent channels and the denoiser ({size.name}) needs {size.latent_channels}"
    if text.t5_width != size.text_width:
        yield f"its T5 is {text.t5_width} wide and the denoiser ({size.name}) needs {size.text_width}"
    if text.pooled_width != size.pooled_width:
        yield f"its pooled text is {text.pooled_width} wide and the denoiser ({size.name}) needs {size.pooled_width}"


def _position_faults(model: ModelConfig, start: WeightsStart, hint: str) -> Iterator[Fault]:
    if model.position_step is None:
        return
    step = start_position_step(start)
    if step is None or abs(step / model.position_step - 1) > _STEP_TOLERANCE:
        table = "another position table" if step is None else f"a position table of step {step:.3g}"
        problem = f"the weights in {start.source} contain {table}"
        yield model_fault("model.position_step", problem, model.position_step, hint)


def _size_faults(model: ModelConfig, start: WeightsStart, hint: str) -> Iterator[Fault]:
    """Yield the size or shape if the weights have another one; `num_layers` and `qk_norm` are checked on their own."""
    if model.size is None and model.shape is None:
        return
    actual = start.size
    layers = None if model.num_layers is None else actual.num_layers
    expected = configured_size(model).with_overrides(layers, None if model.qk_norm is None else actual.qk_norm)
    if names := differences(expected, actual):
        values = ", ".join(f"{name} {getattr(actual, name)} (not {getattr(expected, name)})" for name in names)
        problem = f"the weights in {start.source} have {values}"
        if model.shape is None:
            yield model_fault("model.size", problem, f'"{model.size}"', hint)
        else:
            yield model_fault("model.shape", problem, hint=hint)
