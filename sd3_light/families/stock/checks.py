"""What `check` and `new` read in the folder of a stock pipeline. Only configs are read."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sd3_light.config import Fault, ModelConfig, TrainConfig, UserError
from sd3_light.config.schema_blocks import layer_sync_problem
from sd3_light.config.schema_objective import alignment_problem
from sd3_light.core.checks import ModelChecks, ModelFact, model_fault
from sd3_light.core.start import WeightsStart, denoiser_folder, start_source
from sd3_light.families.stock.latents import LatentShape
from sd3_light.model.folder import components, missing_components, tokenizer_length
from sd3_light.model.part_configs import read_json

if TYPE_CHECKING:
    from sd3_light.families.base import StockFamily

_FOLDER = "model.diffusers_path"
_WHOLE = "download or copy the whole folder"
_DESCRIPTION = ("model_index.json", "transformer/config.json", "vae/config.json")


class StockChecks(ModelChecks):
    """See `ModelChecks`."""

    def __init__(self, family: "StockFamily") -> None:
        self.family = family

    def folder_faults(self, model: ModelConfig) -> Iterator[Fault]:
        """See `ModelChecks.folder_faults`."""
        folder = model.diffusers_path
        if not folder.is_dir():
            yield model_fault(_FOLDER, "no such folder", folder, f"give the diffusers folder of a {self.family.title}")
            return
        for package in self.family.packages:
            if find_spec(package) is None:
                problem = f"{self.family.title} needs {package} for its captions, which is not installed"
                yield model_fault(_FOLDER, problem, folder, f"run `pip install {package}`")
        try:
            yield from self._part_faults(folder, start_source(model) == folder)
            if reason := self._refusal(folder):
                yield model_fault(_FOLDER, reason, folder)
            has_own = model.shift is not None or model.sqrt_shift  # which replaces the scheduler's
            if not has_own and (reason := self.family.scheduler_fault(folder)):
                yield model_fault(_FOLDER, reason, folder)
        except UserError as error:
            yield model_fault(_FOLDER, str(error))

    def _refusal(self, folder: Path) -> str | None:
        """Return why the family does not train a folder's denoiser; None also if a config is missing."""
        is_described = all((folder / name).is_file() for name in _DESCRIPTION)
        return self.family.refusal(folder) if is_described else None

    def _part_faults(self, folder: Path, with_denoiser: bool) -> Iterator[Fault]:
        if not (folder / "model_index.json").is_file():
            yield model_fault(_FOLDER, "the folder lacks model_index.json", folder, _WHOLE)
            return
        kind = read_json(folder / "model_index.json").get("_class_name")
        if kind != self.family.pipeline:
            hint = 'write model.type = "auto", or give another folder'
            yield model_fault(
                _FOLDER, f"it is a {kind!r:.80}, and {self.family.title} a {self.family.pipeline}", folder, hint
            )
            return
        named = components(folder)
        needed = ["vae", "scheduler", *(part for parts in self.family.text_parts.values() for part in parts)]
        needed += ["transformer"] if with_denoiser else []
        for part in needed:
            if part not in named:
                yield model_fault(_FOLDER, f"its model_index.json names no {part}", folder, _WHOLE)
        missing = missing_components(folder, transformer=with_denoiser)
        parts = dict.fromkeys(file.partition("/")[0] for file in missing)
        absent = [part for part in parts if not (folder / part).exists()]
        if absent:
            names = ", ".join(f"{part}/" for part in absent)
            yield model_fault(_FOLDER, f"the folder lacks {names}", folder, _WHOLE)
        for file in missing:
            if file.partition("/")[0] not in absent:
                yield model_fault(_FOLDER, f"the folder lacks {file}", folder, _WHOLE)
        for part in named:
            for path in sorted((folder / part).glob("*.json")):
                read_json(path)

    def has_size(self, model: ModelConfig) -> bool:
        """See `ModelChecks.has_size`."""
        source = start_source(model)
        return source is None or source.is_file() or (denoiser_folder(source) / "config.json").is_file()

    def encoder_faults(self, model: ModelConfig, start: WeightsStart | None) -> Iterator[Fault]:
        """See `ModelChecks.encoder_faults`; missing files are reported with the folder."""
        folder = model.diffusers_path
        parts = ("vae", *(parts[0] for parts in self.family.text_parts.values()))
        files = ("model_index.json", *(f"{part}/config.json" for part in parts))
        if not all((folder / file).is_file() for file in files):
            return
        try:
            if self._refusal(folder) is not None:
                return
            for problem in self._width_problems(model, start):
                yield model_fault(_FOLDER, problem, folder)
            yield from self._length_faults(model)
        except UserError as error:
            yield model_fault(_FOLDER, str(error), folder)

    def _width_problems(self, model: ModelConfig, start: WeightsStart | None) -> Iterator[str]:
        channels = LatentShape.of_folder(model.diffusers_path).channels
        columns = self.family.text_columns(model, model.diffusers_path)
        if start is None:
            return
        config = start.size.transformer_config()
        expected = channels * (self.family.patch**2 if self.family.packs_latents else 1)
        taken = config.get("in_channels")
        if taken != expected:
            yield (
                f"its denoiser takes {taken} channels, and {self.family.title} {expected} for a VAE of {channels}; "
                "a model that takes more images than one is not trained here"
            )
        for column in columns:
            key = self.family.text_inputs.get(column.name)
            if key is not None and column.shape[-1] != config.get(key):
                yield (
                    f"its text encoder returns {column.name} {column.shape[-1]} wide, and the denoiser needs "
                    f"{config.get(key)}"
                )

    def _length_faults(self, model: ModelConfig) -> Iterator[Fault]:
        longest = self.text_limit(model.diffusers_path)
        if longest is not None and self.family.max_length(model) > longest:
            problem = f"its tokenizer accepts at most {longest} tokens"
            value = str(self.family.max_length(model))
            yield Fault("", "model.text_max_length", problem, value, allowed=f"1 to {longest}")

    def key_faults(self, train: TrainConfig, start: WeightsStart) -> Iterator[Fault]:
        """See `ModelChecks.key_faults`."""
        model = train.model
        if model.guidance is not None and not self.family.takes_guidance(start.size.transformer_config()):
            problem = "this denoiser takes no guidance as a number"
            yield model_fault(
                "model.guidance", problem, model.guidance, "remove it; for sample images use sampling.guidance"
            )
        prompts = train.sampling.negative_prompts
        if prompts and self.family.takes_guidance(start.size.transformer_config()):
            problem = "this denoiser takes guidance as a number and no negative prompt"
            yield model_fault("sampling.negative_prompt", problem, f'"{prompts[0]}"', "remove it")
        if self.family.texts_see_references:
            yield from self._text_faults(train)
        if train.terms.layer_sync is not None or train.terms.alignment is not None:
            yield from self._block_faults(train, start)

    def _text_faults(self, train: TrainConfig) -> Iterator[Fault]:
        """Yield the keys that need a text without references, which the family does not have."""
        keys = {
            "model.enable_uncond_text_dropout": train.model.enable_uncond_text_dropout,
            "objective.distill": train.terms.distill is not None,
            "reward": train.reward is not None,
        }
        problem = f"{self.family.title} encodes every text with references, and this needs one without"
        for key in (key for key, is_used in keys.items() if is_used):
            yield Fault("", key, problem, hint="remove it")

    def _block_faults(self, train: TrainConfig, start: WeightsStart) -> Iterator[Fault]:
        """Yield the terms that name blocks which the denoiser lacks."""
        from sd3_light.core.model import denoiser_blocks

        num_blocks = len(denoiser_blocks(self.family.weights.empty(start.size.transformer_config())))
        sync = train.terms.layer_sync
        if sync is not None and (problem := layer_sync_problem(sync, num_blocks)):
            yield Fault("", train.spelled("model.layer_sync"), **problem)
        alignment = train.terms.alignment
        if alignment is not None and (problem := alignment_problem(alignment, num_blocks)):
            yield Fault("", "objective.alignment", **problem)

    def largest_side(self, start: WeightsStart, model: ModelConfig) -> int | None:
        """See `ModelChecks.largest_side`."""
        tokens = self.family.position_table(start.size.transformer_config())
        return None if tokens is None else tokens * self.side_step(model)

    def side_step(self, model: ModelConfig) -> int:
        """See `ModelChecks.side_step`."""
        return self.family.token_side(model.diffusers_path)

    def facts(self, start: WeightsStart) -> tuple[ModelFact, ...]:
        """See `ModelChecks.facts`."""
        if not self.family.takes_guidance(start.size.transformer_config()):
            return ()
        meaning = "the denoiser is distilled: it takes guidance as a number (model.guidance in training)"
        return (ModelFact("guidance", "embedded", meaning, "guidance-distilled"),)

    def trained_side(self, folder: Path) -> int:
        """See `ModelChecks.trained_side`."""
        return self.family.trained_side

    def text_limit(self, folder: Path) -> int | None:
        """See `ModelChecks.text_limit`: that of the tokenizer of the last text encoder."""
        *_, (_, tokenizer, *_rest) = self.family.text_parts.values()
        return tokenizer_length(folder / tokenizer)
