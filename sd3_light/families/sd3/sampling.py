"""How SD3's images are drawn with the denoiser that trains."""

from collections.abc import Mapping, Sequence

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from sd3_light.config import ModelConfig
from sd3_light.core.batch import Batch
from sd3_light.core.sampling import EncodedText, Sampling
from sd3_light.encoding.vae import VaeDecoder
from sd3_light.families.sd3.cost import image_tokens
from sd3_light.families.sd3.sample_texts import batch_texts, join_features, unconditional_text
from sd3_light.flow.scheduler import flow_scheduler, set_timesteps
from sd3_light.flow.timesteps import constant_shift
from sd3_light.model.base_values import kept_scheduler
from sd3_light.model.folder import vae_shape


class SD3Sampling(Sampling):
    """See `Sampling`."""

    def text(self, features: Mapping[str, Tensor]) -> EncodedText:
        """See `Sampling.text`."""
        return join_features(features)

    def negative_text(self, empty: EncodedText, model: ModelConfig) -> EncodedText:
        """See `Sampling.negative_text`."""
        return empty if model.uncond_text == "empty" else unconditional_text(empty, model.text_tokens)

    def batch(self, texts: Sequence[EncodedText], model: ModelConfig, guidance: float) -> Batch:
        """See `Sampling.batch`."""
        batch = batch_texts(texts, torch.float32)
        return batch if model.text_tokens == "real" else Batch(batch.size, batch.values)

    def latent_shape(self, model: ModelConfig, size: tuple[int, ...]) -> tuple[int, ...]:
        """See `Sampling.latent_shape`."""
        channels, factor = vae_shape(model.diffusers_path)
        width, height = size
        return channels, height // factor, width // factor

    def scheduler(
        self, model: ModelConfig, size: tuple[int, ...], steps: int, device: torch.device
    ) -> FlowMatchEulerDiscreteScheduler:
        """See `Sampling.scheduler`."""
        width, height = size
        tokens = image_tokens(width, height)
        shift = constant_shift(model, tokens)
        scheduler = flow_scheduler(shift, model.flux_shift, kept_scheduler(model), model.last_time)
        set_timesteps(scheduler, steps, tokens, device)
        return scheduler

    def decoder(self, model: ModelConfig, device: torch.device) -> VaeDecoder:
        """See `Sampling.decoder`."""
        return VaeDecoder(model.diffusers_path, device)
