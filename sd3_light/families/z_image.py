"""Z-Image: its denoiser counts time from noise to data, and takes lists of images and texts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sd3_light.config import ModelConfig
from sd3_light.core.sampling import OwnDrawing
from sd3_light.families.base import StockFamily, resolution_shift
from sd3_light.families.stock.texts import text_mask
from sd3_light.model.part_configs import read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sd3_light.core.batch import Batch


class ZImage(StockFamily):
    """Captions have their own lengths: the denoiser pads them itself, to multiples of 32 that it attends to."""

    name = "z_image"
    title = "Z-Image"
    pipeline = "ZImagePipeline"
    denoiser = "ZImageTransformer2DModel"
    text_parts = MappingProxyType({"qwen": ("text_encoder", "tokenizer")})
    adapter_targets = ("attention.to_*", "feed_forward.w[123]")
    text_inputs = MappingProxyType({"text": "cap_feat_dim"})
    text_steps = (32,)
    samplers = ()  # the pipeline passes times
    dynamic_samplers = ()
    usual_guidance = 5.0
    unguided = 0.0
    joins_guidance = True
    compiled_share = (0.37, 0.56)
    comfyui = True
    cudnn_attention = True  # diffusers' script trains with it

    def refusal(self, folder: Path) -> str | None:
        """See `Family.refusal`."""
        config = read_json(folder / "transformer" / "config.json")
        if config.get("siglip_feat_dim"):
            return "its denoiser takes images beside the text, which is not trained"
        if config.get("all_patch_size") != [self.patch] or config.get("all_f_patch_size") != [1]:
            return "its denoiser has several patch sizes, which are not trained"
        return None

    def position_table(self, config: Mapping[str, Any]) -> int | None:
        """See `StockFamily.position_table`: the first axis is that of texts."""
        lengths = config.get("axes_lens")
        is_list = isinstance(lengths, list | tuple) and all(isinstance(length, int) for length in lengths)
        return min(lengths[1:], default=None) if is_list and lengths else None

    def own_drawing(self, config: Mapping[str, Any]) -> OwnDrawing:
        """See `StockFamily.own_drawing`: nothing in its folder tells Turbo."""
        note = "Z-Image-Turbo, whose configs are the same, needs --steps 8 --guidance 0"
        return OwnDrawing(guidance=self.usual_guidance, note=note)

    def denoise(self, denoiser: "nn.Module", batch: "Batch", guidance: float) -> "Tensor":
        """See `StockFamily.denoise`. The denoiser predicts data - noise."""
        import torch

        dtype: Any = denoiser.dtype
        time = (1000 - (1000 * batch["t"]).float()) / 1000  # 1 - t, rounded as the pipeline does
        images = list(batch["noisy"].to(dtype).unsqueeze(2))
        with _padded_inside(denoiser, batch):
            velocities = denoiser(images, time, _texts(batch), return_dict=False)[0]
        return -torch.stack(velocities).squeeze(2).float()

    def rounded(self, batch: "Batch", step: int) -> "Batch":
        """See `StockFamily.rounded`: texts that the denoiser pads to several lengths move the images."""
        lengths = batch.lengths("text")
        if lengths is None or len({-(-length // step) for length in lengths.tolist()}) > 1:
            return batch
        return super().rounded(batch, step)

    def speed_up(self, denoiser: "nn.Module") -> None:
        """See `StockFamily.speed_up`."""
        from sd3_light.families.stock.attention import ZImageAttention, use_attention

        use_attention(denoiser, ZImageAttention())

    def image_part(self, output: Any, batch: "Batch") -> "Tensor":
        """See `StockFamily.image_part`: image tokens come first."""
        height, width = batch["noisy"].shape[-2:]
        tokens: Tensor = output[:, : height * width // self.patch**2]
        return tokens

    def encode_captions(self, pipe: Any, texts: Sequence[str], model: ModelConfig) -> "Mapping[str, Sequence[Tensor]]":
        """See `StockFamily.encode_captions`. The pipeline writes into the list that it gets."""
        length = self.max_length(model)
        options = {"do_classifier_free_guidance": False, "max_sequence_length": length}
        return {"text": pipe.encode_prompt(prompt=list(texts), **options)[0]}

    def set_times(self, scheduler: Any, steps: int, tokens: int) -> None:
        """See `StockFamily.set_times`."""
        import torch

        sigmas = torch.linspace(1.0, 1 / steps, steps).tolist()  # in float32, unlike Flux's
        scheduler.set_timesteps(sigmas=sigmas, mu=resolution_shift(scheduler.config, tokens))
        scheduler.set_begin_index(0)

    def pipeline_arguments(self, texts: "Batch", negative: "Batch | None", guidance: float) -> dict[str, Any]:
        """See `StockFamily.pipeline_arguments`."""
        arguments = {"prompt_embeds": _texts(texts), "guidance_scale": guidance}
        return arguments if negative is None else {**arguments, "negative_prompt_embeds": _texts(negative)}


@contextmanager
def _padded_inside(denoiser: "nn.Module", batch: "Batch") -> Iterator[None]:
    """Give padded rows of a batch with a mask what the denoiser pads texts with, after their embedding."""
    import torch

    if batch.get("text.length") is None:
        yield
        return
    mask = text_mask(batch)
    assert mask is not None
    parts: Any = denoiser

    def fill(module: "nn.Module", inputs: Any, rows: "Tensor") -> "Tensor":
        return torch.where(mask.flatten()[:, None], rows, parts.cap_pad_token)

    handle = parts.cap_embedder.register_forward_hook(fill)
    try:
        yield
    finally:
        handle.remove()


def _texts(batch: "Batch") -> "list[Tensor]":
    """Return the rows of every text."""
    lengths = batch.lengths("text")
    if lengths is None:
        return list(batch["text"])
    return [rows[:count] for rows, count in zip(batch["text"], lengths.tolist(), strict=True)]
