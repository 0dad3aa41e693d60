"""A batch in, a loss out: the denoiser run through its layers, compared with the flow's velocity."""

from collections.abc import Iterator, Sequence

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from sd3_light.config import TrainConfig
from sd3_light.flow.objective import flow_loss, text_reconstruction_loss
from sd3_light.model.adapter_layers import AdapterDropout
from sd3_light.model.fast.block import BlockOptions, Keep, Products
from sd3_light.model.fast.choice import why_stock_by_config, why_stock_on_device
from sd3_light.model.fast.forward import FastDenoiser, why_stock
from sd3_light.model.layers import Embed, LayerState, build_layers, run_layers, unpatchify
from sd3_light.model.start import where_weights_start

Losses = dict[str, Tensor]
Label = tuple[Tensor | None, ...]
"""(target, mask) and, in evaluation, each sample's weight, which no loss here reads."""


_KEEPS: dict[bool | str, Keep] = {False: "all", True: "inputs", "selective": "products"}


def why_stock_blocks(
    config: TrainConfig, transformer: SD3Transformer2DModel, device: str, world: int = 1, by_deepspeed: bool = False
) -> str | None:
    """Why a module on this machine computes with the stock blocks, in words; None where it takes the fast ones."""
    size = where_weights_start(config.model).size
    return (
        why_stock_by_config(config, size, world, by_deepspeed)
        or why_stock_on_device(config, device)
        or why_stock(transformer)
    )


class SD3TrainingModule(nn.Module):
    """``module(features, label)`` gives the loss of a micro-batch, its parts (each a mean over its samples), and the
    flow loss of ``each`` sample; ``module.denoise(features)`` gives the predicted velocity.

    ``features`` are what `InputPreparer.prepare_inputs` makes, with lengths exactly where the config's text is real;
    lengths had best stay on the host. With ``fast`` the blocks run by hand-written kernels (`model/fast`).
    """

    def __init__(self, transformer: SD3Transformer2DModel, config: TrainConfig, fast: bool = False) -> None:
        super().__init__()
        self.transformer = transformer
        self.fast = fast
        self.gamma = config.model.text_recon_gamma
        self.pseudo_huber_c = config.pseudo_huber_c
        self.checkpointing = config.activation_checkpointing
        self.compute_dtype = getattr(torch, config.model.transformer_dtype)
        self.real_text = config.model.text_tokens == "real"
        target_layer = config.model.text_recon_target_layer if self.gamma > 0 else None
        self.target_layer = target_layer
        self.products: Products = "fp8" if config.fp8 else "plain"
        self._fast: FastDenoiser | None = None
        self.dropout: AdapterDropout | None = None
        # a plain list: the layers share the transformer's modules and must not name its parameters twice
        self._layers = [*build_layers(transformer, target_layer, self.real_text)]

    def trainable_modules(self) -> Iterator[nn.Parameter]:
        """The parameters that train."""
        return (parameter for parameter in self.parameters() if parameter.requires_grad)

    @property
    def loss_names(self) -> tuple[str, ...]:
        """The losses of a micro-batch besides ``each``, in their order."""
        return ("loss", "flow", "text_recon") if self.gamma > 0 else ("loss", "flow")

    def forward(self, features: tuple[Tensor, ...], label: Label) -> Losses:
        """The loss with its gradient; its parts and ``each`` without."""
        return self.losses(self.run(features), label)

    def losses(self, outputs: LayerState, label: Label) -> Losses:
        """What `forward` returns, from the last layer's outputs."""
        target, mask = label[:2]
        assert target is not None
        patches, text, *rest = outputs
        each = flow_loss(unpatchify(patches, *target.shape[-2:]), target, mask, self.pseudo_huber_c)
        flow = each.mean()
        losses = {"loss": flow, "flow": flow.detach(), "each": each.detach()}
        if self.gamma > 0:
            lengths = rest[0] if self.real_text else None
            recon = text_reconstruction_loss(text, rest[-1], lengths).mean()
            losses |= {"loss": flow + self.gamma * recon, "text_recon": recon.detach()}
        return losses

    def denoise(self, features: tuple[Tensor, ...]) -> Tensor:
        """The velocity [B, C, H, W] in float32, computed as in training; the caller says whether gradients are kept."""
        return self.velocity(self.run(features), features[0].shape[-2:])

    def velocity(self, outputs: LayerState, size: Sequence[int]) -> Tensor:
        """What `denoise` returns, from the last layer's outputs; ``size`` is the latent's height and width."""
        height, width = size
        return unpatchify(outputs[0], height, width).float()

    def pipeline_layers(self) -> list[nn.Module]:
        """The layers as modules that can be run one after another in several processes, each as `forward` runs it."""
        return [PipelineLayer(self, layer, number) for number, layer in enumerate(self._layers)]

    def run(self, features: tuple[Tensor, ...]) -> LayerState:
        """All layers; gives the last one's outputs, of which `losses` and `velocity` are made."""
        if self.dropout is not None:
            self.dropout.forward(features[0].device)
        return self._run_fast(features) if self.fast else self.run_some(self._layers, self.inputs(features))

    def inputs(self, features: tuple[Tensor, ...]) -> LayerState:
        """What the first layer takes."""
        self._require(features)
        device = features[0].device
        return (
            *(feature.float() for feature in features[:4]),
            *(lengths.to(device, non_blocking=True) for lengths in features[4:]),
        )

    def _require(self, features: tuple[Tensor, ...]) -> None:
        assert len(features) == 4 + self.real_text, f"{len(features)} features, real text: {self.real_text}"

    def _run_fast(self, features: tuple[Tensor, ...]) -> LayerState:
        """What the last layer would give; a text that nobody reads is empty."""
        self._require(features)
        noisy, times, prompt, pooled, *lengths = features
        fast = self._fast_denoiser(noisy.device)
        given = (noisy.float(), times.float(), prompt.to(fast.dtype), pooled)
        counts = lengths[0].tolist() if lengths else None
        patches, *texts = fast.with_text(given, counts, self.target_layer)
        if not texts:
            return (patches, patches.new_empty(0))
        text, target = texts
        return (patches, text, *(part.to(noisy.device, non_blocking=True) for part in lengths), target)

    def _fast_denoiser(self, device: torch.device) -> FastDenoiser:
        """Made when it is first needed: its copies of weights lie where they do."""
        if self._fast is None:
            dtype = self.compute_dtype if device.type == "cuda" else torch.float32
            how = BlockOptions(keep=_KEEPS[self.checkpointing], products=self.products)
            self._fast = FastDenoiser(self.transformer, dtype, how)
        return self._fast

    def run_some(self, layers: Sequence[nn.Module], state: LayerState) -> LayerState:
        """Some layers after another, computing in the config's type."""
        device = state[0].device
        autocast = device.type == "cuda" and self.compute_dtype != torch.float32
        with torch.autocast(device.type, self.compute_dtype, enabled=autocast):
            return run_layers(layers, state, self.checkpointing)


class PipelineLayer(nn.Module):
    """One layer of a module, as a pipeline's stages hold it; the first one takes features."""

    def __init__(self, module: SD3TrainingModule, layer: nn.Module, number: int) -> None:
        super().__init__()
        self.layer, self.number = layer, number
        self._module = (module,)  # in a tuple: not a part of this one

    def forward(self, state: LayerState) -> LayerState:
        """The layer alone."""
        (module,) = self._module
        if module.dropout is not None:
            module.dropout.forward(state[0].device, self.number)
        return module.run_some([self.layer], module.inputs(state) if isinstance(self.layer, Embed) else state)
