"""How images of a stock denoiser are drawn while it trains: with the scheduler of its folder, as its pipeline does."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from sd3_light.config import ModelConfig
from sd3_light.core.batch import LENGTH, Batch
from sd3_light.core.columns import Bucket, Column
from sd3_light.core.sampling import EncodedText, Sampling
from sd3_light.core.start import denoiser_folder, start_source
from sd3_light.encoding.vae import VaeDecoder
from sd3_light.families.stock.latents import LatentShape
from sd3_light.flow.scheduler import folder_scheduler
from sd3_light.flow.timesteps import constant_shift
from sd3_light.model.part_configs import read_json

if TYPE_CHECKING:
    from sd3_light.families.base import StockFamily


class StockSampling(Sampling):
    """See `Sampling`."""

    def __init__(self, family: "StockFamily") -> None:
        self._family = family
        self.joins_guidance = family.joins_guidance

    def text(self, features: Mapping[str, Tensor]) -> EncodedText:
        """See `Sampling.text`."""
        return features

    def negative_text(self, empty: EncodedText, model: ModelConfig) -> EncodedText | None:
        """See `Sampling.negative_text`."""
        source = start_source(model)
        assert source is not None, "a stock denoiser starts from a folder"
        return None if self._family.takes_guidance(read_json(denoiser_folder(source) / "config.json")) else empty

    def batch(self, texts: Sequence[EncodedText], model: ModelConfig, guidance: float) -> Batch:
        """See `Sampling.batch`. A distilled denoiser reads ``guidance``."""
        columns = self._family.text_columns(model, model.diffusers_path)
        batch = batch_texts(texts, columns, self._family.pads_text or self._family.pads_prompts).map_tensors(
            Tensor.float
        )
        return batch.with_values({"guidance": torch.full((len(texts),), guidance)})

    def latent_shape(self, model: ModelConfig, size: tuple[int, ...]) -> tuple[int, ...]:
        """See `Sampling.latent_shape`."""
        shape = LatentShape.of_folder(model.diffusers_path)
        return shape.latents(Bucket(*size), self._family.media == "video")

    def scheduler(self, model: ModelConfig, size: tuple[int, ...], steps: int, device: torch.device) -> Any:
        """See `Sampling.scheduler`."""
        *_, height, width = self.latent_shape(model, size)
        tokens = height * width // self._family.patch**2
        scheduler = folder_scheduler(model.diffusers_path, constant_shift(model, tokens))
        self._family.set_times(scheduler, steps, tokens)
        return scheduler

    def decoder(self, model: ModelConfig, device: torch.device) -> VaeDecoder:
        """See `Sampling.decoder`."""
        return VaeDecoder(model.diffusers_path, device)

    def is_guided(self, guidance: float) -> bool:
        """See `Sampling.is_guided`."""
        return self._family.is_guided(guidance)

    def guide(self, negative: Tensor, positive: Tensor, guidance: float) -> Tensor:
        """See `Sampling.guide`."""
        return self._family.guide(negative, positive, guidance)


def batch_texts(texts: Sequence[EncodedText], columns: Sequence[Column], pads_text: bool) -> Batch:
    """Batch texts: ragged ones are padded with zeros, with ``pads_text`` to their full length, and have lengths."""
    values: dict[str, Tensor] = {}
    host: dict[str, Tensor] = {}
    for column in columns:
        rows = [text[column.name] for text in texts]
        if not column.ragged:
            values[column.name] = torch.stack(rows)
            continue
        host[column.name + LENGTH] = torch.tensor([len(row) for row in rows])
        padded = pad_sequence(rows, batch_first=True)
        missing = column.shape[0] - padded.shape[1] if pads_text else 0
        values[column.name] = pad(padded, (*[0, 0] * (padded.dim() - 2), 0, missing)) if missing else padded
    return Batch(len(texts), values, host)
