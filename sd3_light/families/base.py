"""The base of families of stock diffusers pipelines: a family's file adds its texts and how its denoiser is called."""

import json
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sd3_light.config import ModelConfig, TrainConfig
from sd3_light.core.columns import (
    CAPTION,
    IMAGE,
    REFERENCE,
    SMALLEST,
    Bucket,
    Column,
    mask_column,
    prepared_columns,
    with_references,
)
from sd3_light.core.family import Family
from sd3_light.core.sampling import OwnDrawing
from sd3_light.core.start import WeightsStart, denoiser_folder, start_source
from sd3_light.families.stock.checks import StockChecks
from sd3_light.families.stock.latents import LatentShape
from sd3_light.families.stock.texts import encoder_width
from sd3_light.families.stock.weights import StockWeights
from sd3_light.model.base_values import drawing_of_run, drawn_as
from sd3_light.model.part_configs import read_config, read_json
from sd3_light.sources.buckets import SIDE_STEP

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

    from sd3_light.core.batch import Batch
    from sd3_light.core.files import AdapterNames
    from sd3_light.families.stock.cost import StockCost
    from sd3_light.families.stock.encoding import StockEncoding
    from sd3_light.families.stock.files import StockFiles
    from sd3_light.families.stock.model import StockTraining
    from sd3_light.families.stock.sampling import StockSampling

_DROPPED = {"uncond_text_dropout": "joint", "uncond_text_dropout_prob": 0.1}


class StockFamily(Family):
    """A family of a stock pipeline.

    ``text_parts`` are the subfolders of each text encoder and its tokenizer, ``adapter_targets`` the layers that a LoRA
    changes by default, ``text_length`` the tokens of a caption unless the config says otherwise. Real text can be
    padded to multiples of ``text_steps`` without another result, so that batches have few shapes. A denoiser with
    ``packs_latents`` takes whole patches as channels. ``text_inputs`` names
    the entry of the denoiser's config that is as wide as a column of captions. Text is padded to exactly its length if
    ``pads_text``; otherwise ragged columns are padded to the longest of a batch, and with ``pads_prompts`` those of
    sampling to their full length, under a mask, as in the stock pipeline. ``usual_guidance`` is that of the stock
    pipeline's call, which takes none up to ``unguided``, runs prompts and negative prompts as one batch if it
    ``joins_guidance``, and takes one prompt at a time if it has ``single_prompts``. ``trained_side`` is that of a
    square with as many pixels as the images that its models were trained on. A family of videos has latents with
    frames, those of an image one; ``usual_clip`` are the frames of a clip, and their rate per second. ``samplers`` are
    those that the stock pipeline can draw with in place of Euler, ``dynamic_samplers`` if the shift is by resolution,
    which it computes if it ``sets_dynamic_shift``. ``cudnn_attention`` may be used for training: its backward pass ends
    the process where gradients have other strides than the first (H200, torch 2.11), and is tested where this is true.
    ``compiled_share`` is that of its cost.
    """

    text_parts: ClassVar[Mapping[str, tuple[str, ...]]]
    adapter_targets: ClassVar[tuple[str, ...]]
    text_length: ClassVar[int] = 512
    text_steps: ClassVar[tuple[int, ...]] = ()
    packs_latents: ClassVar[bool] = False
    text_inputs: ClassVar[Mapping[str, str]] = {}
    pads_text: ClassVar[bool] = False
    pads_prompts: ClassVar[bool] = False
    usual_guidance: ClassVar[float] = 4.0
    unguided: ClassVar[float] = 1.0
    joins_guidance: ClassVar[bool] = False
    single_prompts: ClassVar[bool] = False
    trained_side: ClassVar[int] = 1024
    usual_clip: ClassVar[tuple[int, float]] = (1, 1.0)
    samplers: ClassVar[tuple[str, ...]] = ("heun", "dpm++")
    dynamic_samplers: ClassVar[tuple[str, ...]] = ("heun", "dpm++")
    sets_dynamic_shift: ClassVar[bool] = True
    cudnn_attention: ClassVar[bool] = False
    compiled_share: ClassVar[tuple[float, float]] = (1.0, 1.0)

    # --- what a family's file says ---------------------------------------------------------------

    def frozen(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return patterns of weights that get no gradient in a denoiser with this config, and cannot be trained."""
        return ()

    def text_columns(self, model: ModelConfig, folder: Path) -> tuple[Column, ...]:
        """Return what a cache stores of a caption; no weight is read. Rows of the column `text` are tokens.

        By default they are the real tokens of the only text encoder.
        """
        (parts,) = self.text_parts.values()
        length = self.max_length(model)
        shape = (length, encoder_width(folder, parts[0]))
        return (Column("text", CAPTION, "bfloat16", shape, parts, ragged=True, settings=self.text_settings(model)),)

    @abstractmethod
    def encode_captions(self, pipe: Any, texts: Sequence[str], model: ModelConfig) -> "Mapping[str, Sequence[Tensor]]":
        """Return the values of `text_columns` for texts, by a pipeline that has only tokenizers and text encoders.

        A value is a sequence of rows, one for each text; those of a ragged column differ in length.
        """

    def encode_columns(
        self, pipe: Any, texts: Sequence[str], model: ModelConfig, columns: Collection[str]
    ) -> "Mapping[str, Sequence[Tensor]]":
        """Return the values of `encode_captions`, of these columns at least."""
        return self.encode_captions(pipe, texts, model)

    def encode_pairs(
        self, pipe: Any, texts: Sequence[str], images: "Sequence[Sequence[Image.Image]]", model: ModelConfig
    ) -> "Mapping[str, Sequence[Tensor]]":
        """Return the values of texts that are encoded with references, those of each text in their order."""
        raise NotImplementedError

    def encode_negatives(self, pipe: Any, texts: Sequence[str], model: ModelConfig) -> "Mapping[str, Sequence[Tensor]]":
        """Return the values of negative prompts: those of captions, unless the pipeline encodes them differently."""
        return self.encode_captions(pipe, texts, model)

    def encode_empty(self, pipe: Any, model: ModelConfig) -> "Mapping[str, Tensor]":
        """Return the values of the unconditional text: of the empty caption, unless the pipeline has another one."""
        return {name: rows[0] for name, rows in self.encode_negatives(pipe, [""], model).items()}

    @abstractmethod
    def denoise(self, denoiser: "nn.Module", batch: "Batch", guidance: float) -> "Tensor":
        """Return the velocity of a batch with the values noisy, t and those of `text_columns`.

        ``guidance`` is the number that a distilled denoiser takes, unless the batch has its own; others ignore it.
        """

    def rounded(self, batch: "Batch", step: int) -> "Batch":
        """Return a batch with the same velocity whose text has a multiple of ``step`` rows, one of `text_steps`.

        Its lengths are on the device. A batch that would have another velocity stays as it is.
        """
        from sd3_light.families.stock.texts import rounded_text

        return rounded_text(batch, step)

    def speed_up(self, denoiser: "nn.Module") -> None:
        """Replace parts of a denoiser by others that compute the same on a GPU in less time."""

    def takes_guidance(self, config: Mapping[str, Any]) -> bool:
        """Return whether a denoiser with this config takes guidance as a number and runs once per step."""
        return "number" in self.guidance and bool(config.get("guidance_embeds"))

    def position_table(self, config: Mapping[str, Any]) -> int | None:
        """Return the tokens at which the positions of a denoiser with this config end; None: they do not end."""
        return None

    def own_drawing(self, config: Mapping[str, Any]) -> OwnDrawing:
        """Return the guidance, and of a distilled model the steps, with which a denoiser with this config draws."""
        return OwnDrawing(guidance=self.usual_guidance)

    def is_guided(self, guidance: float) -> bool:
        """Return whether this guidance needs the unconditional text."""
        return guidance > self.unguided

    def guide(self, negative: "Tensor", positive: "Tensor", guidance: float) -> "Tensor":
        """Return the guided velocity, as the stock pipeline computes it.

        Where it takes none up to 0, guidance s is that of 1 + s elsewhere.
        """
        return (negative if self.unguided else positive) + guidance * (positive - negative)

    def set_times(self, scheduler: Any, steps: int, tokens: int) -> None:
        """Set a scheduler's timesteps as the stock pipeline does, for an image with this number of tokens."""
        if self.sets_dynamic_shift:
            set_shifted_times(scheduler, steps, resolution_shift(scheduler.config, tokens))
        else:
            scheduler.set_timesteps(steps)

    def pipeline_arguments(self, texts: "Batch", negative: "Batch | None", guidance: float) -> dict[str, Any]:
        """Return the arguments of the stock pipeline's call for encoded texts and guidance.

        There are negative texts where `is_guided`, and the denoiser takes no guidance as a number.
        """
        arguments = {"prompt_embeds": texts["text"], "guidance_scale": guidance}
        return arguments if negative is None else {**arguments, "negative_prompt_embeds": negative["text"]}

    def reference_arguments(self, images: Any, size: tuple[int, int]) -> dict[str, Any]:
        """Return the arguments of the stock pipeline's call for references of a width and height.

        They are images, or latents [B, C, h, w]; there may be none.
        """
        raise NotImplementedError

    def image_part(self, output: Any, batch: "Batch") -> "Tensor":
        """Return the image tokens of a block's output."""
        tokens: Tensor = output[-1] if isinstance(output, tuple) else output
        return tokens

    def adapter_names(self) -> "AdapterNames":
        """Return the names in adapter files."""
        from sd3_light.core.files import AdapterNames

        return AdapterNames(f"a {self.title} denoiser", self.comfyui, self.name)

    # --- what follows from it --------------------------------------------------------------------

    @cached_property
    def weights(self) -> StockWeights:
        """The denoiser's weights."""
        return StockWeights(self.title, self.denoiser)

    @cached_property
    def training(self) -> "StockTraining":
        """What a run needs beside the weights."""
        from sd3_light.families.stock.model import StockTraining

        return StockTraining(self)

    @cached_property
    def encoding(self) -> "StockEncoding":
        """The frozen networks."""
        from sd3_light.families.stock.encoding import StockEncoding

        return StockEncoding(self)

    @cached_property
    def sampling(self) -> "StockSampling":
        """Images of the denoiser that trains."""
        from sd3_light.families.stock.sampling import StockSampling

        return StockSampling(self)

    @cached_property
    def files(self) -> "StockFiles":
        """Exported folders and their proof, adapter files."""
        from sd3_light.families.stock.files import StockFiles

        return StockFiles(self)

    @cached_property
    def checks(self) -> StockChecks:
        """What `check` and `new` read in a model folder."""
        return StockChecks(self)

    def token_side(self, folder: Path) -> int:
        """Return the pixels of a token's side, for the VAE of a model folder."""
        return LatentShape.of_folder(folder).factor * self.patch

    def max_length(self, model: ModelConfig) -> int:
        """Return the tokens of the longest caption."""
        if model.text_max_length is not None:
            return model.text_max_length
        return min(self.text_length, self.checks.text_limit(model.diffusers_path) or self.text_length)

    def text_settings(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of [model] that decide the values of a caption."""
        return {"text_max_length": self.max_length(model)}

    def completed(self, config: TrainConfig) -> TrainConfig:
        """See `Family.completed`: length and dropout of text, the layers of an adapter, how images are drawn.

        What cannot be trained is frozen.
        """
        model = config.model
        update: dict[str, Any] = {"text_max_length": self.max_length(model)}
        update["uncond_text"] = model.uncond_text or "empty"
        update |= {key: value for key, value in _DROPPED.items() if key not in model.model_fields_set}
        table = model.model_copy(update=update)
        adapter = config.adapter
        if adapter is not None and "target_modules" not in adapter.model_fields_set:
            adapter = adapter.model_copy(update={"target_modules": self.adapter_targets})
        tables: dict[str, Any] = {"model": table, "adapter": adapter}
        denoiser = _denoiser_config(model)
        if denoiser is None:
            return config.model_copy(update=tables)
        drawn = drawn_as(self.own_drawing(denoiser), drawn_as(self.drawing(config), config))
        tables |= {"sampling": drawn.sampling, "metrics": drawn.metrics}
        if adapter is None:
            frozen = (pattern for pattern in self.frozen(denoiser) if pattern not in config.freeze)
            tables["freeze"] = (*config.freeze, *frozen)
        return config.model_copy(update=tables)

    def drawing(self, config: TrainConfig) -> OwnDrawing:
        """See `Family.drawing`."""
        denoiser = None if config.terms.distill is None else _denoiser_config(config.model)
        if denoiser is None:
            return drawing_of_run(config, self.unguided)
        unguided = None if self.takes_guidance(denoiser) else self.unguided
        return drawing_of_run(config, unguided, self.own_drawing(denoiser).guidance)

    def scheduler_fault(self, folder: Path) -> str | None:
        """See `Family.scheduler_fault`."""
        if self.sets_dynamic_shift or not (folder / "scheduler" / "scheduler_config.json").is_file():
            return None
        if not read_config(folder / "scheduler", "scheduler").get("use_dynamic_shifting"):
            return None
        return (
            f"its scheduler shifts by resolution, and {self.pipeline} computes no such shift; write "
            '"use_dynamic_shifting": false in scheduler/scheduler_config.json'
        )

    def no_guidance(self, start: WeightsStart) -> float | None:
        """See `Family.no_guidance`."""
        return None if self.takes_guidance(start.size.transformer_config()) else self.unguided

    def recipe(self, folder: Path) -> Mapping[str, Any]:
        """See `Family.recipe`: a new project of SD3 with the text, the shift and the layers of this family."""
        limit = self.checks.text_limit(folder) or self.text_length
        scheduler = read_config(folder / "scheduler", "scheduler")
        shift = scheduler.get("shift", scheduler.get("flow_shift", 1.0))
        is_dynamic = bool(scheduler.get("use_dynamic_shifting"))
        config = read_json(denoiser_folder(folder) / "config.json")
        own = self.own_drawing(config)
        keys = {
            **dict.fromkeys(("freeze", "model.init", "model.t5_max_length", "model.uncond_text")),
            "model.uncond_text_dropout": None,
            "model.text_max_length": min(self.text_length, limit),
            "model.shift": None if is_dynamic else float(shift),
            "sampling.guidance": own.guidance,
            "adapter.target_modules": list(self.adapter_targets),
        }
        step = self.token_side(folder)
        if step > SIDE_STEP:
            keys["side_step"] = step
        if self.media == "video":
            keys["frames"], keys["fps"] = self.usual_clip
        if is_dynamic:
            keys["model.flux_shift"] = True
        if self.takes_guidance(config):
            keys["model.guidance"] = 1.0
        if own.steps is not None:
            keys["sampling.steps"] = own.steps
        return keys

    def frame_step(self, folder: Path) -> int | None:
        """See `Family.frame_step`."""
        return LatentShape.of_folder(folder).frame_step if self.media == "video" else None

    def cost(self, start: WeightsStart, model: ModelConfig) -> "StockCost":
        """See `Family.cost`."""
        folder = model.diffusers_path
        config = json.dumps(start.size.transformer_config(), sort_keys=True)
        shape = LatentShape.of_folder(folder)
        return _counted(self, config, self.prepared_columns(model, self.columns(model, folder, SMALLEST)), shape)

    def columns(self, model: ModelConfig, folder: Path, bucket: Bucket) -> tuple[Column, ...]:
        """See `Family.columns`: moments of the VAE, a mask, and the columns of captions."""
        shape = LatentShape.of_folder(folder)
        # the precisions that "auto" chooses differ by less than the latents' own noise
        settings = {} if model.vae_dtype == "auto" else {"vae_dtype": model.vae_dtype}

        def moments(size: Bucket) -> Column:
            stored = shape.moments(size, self.media == "video")
            return Column("moments", IMAGE, "float16", stored, ("vae",), settings=settings)

        own = (moments(bucket), mask_column(shape.size(bucket), shape.factor))
        images = with_references(own, self.reference_count(model), [moments(self.reference_bucket(bucket))])
        return (*images, *self.text_columns(model, folder))

    def prepared_columns(self, model: ModelConfig, columns: Sequence[Column]) -> tuple[Column, ...]:
        """See `Family.prepared_columns`: latents in float32, texts as they are stored."""
        moments = next(column for column in columns if column.name == "moments")
        channels = LatentShape.of_folder(model.diffusers_path).channels
        images = prepared_columns(moments, channels)
        references = (
            replace(images[0], name=column.reads, reads=column.reads, shape=(channels, *column.shape[1:]))
            for column in columns
            if column.reads.startswith(REFERENCE)
        )
        return (*images, *references, *(column for column in columns if column.per_caption))


def _denoiser_config(model: ModelConfig) -> dict[str, Any] | None:
    """Return the config of the denoiser that a [model] table starts from; None if there is none."""
    path = denoiser_folder(start_source(model) or model.diffusers_path) / "config.json"
    return read_json(path) if path.is_file() else None


@lru_cache(maxsize=32)
def _counted(family: StockFamily, config: str, prepared: tuple[Column, ...], shape: LatentShape) -> "StockCost":
    """Return the cost of a denoiser; counting takes seconds, and stages ask several times."""
    from sd3_light.families.stock.cost import StockCost

    return StockCost(family, family.weights.empty(json.loads(config)), prepared, shape)


def resolution_shift(config: Any, tokens: int) -> float:
    """Return the logarithm of the shift of a scheduler's config, which grows with the tokens of an image."""
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    shift: float = tokens * slope + (config.base_shift - slope * config.base_image_seq_len)
    return shift


def set_shifted_times(scheduler: Any, steps: int, shift: float) -> None:
    """Set times from 1 to 1 / steps, as Flux's pipeline does, and several that took it over.

    The scheduler shifts them: by its own number, or by ``shift`` if that depends on the resolution.
    """
    import numpy as np

    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=shift)
    scheduler.set_begin_index(0)
