"""Batch in, loss out: runs the denoiser's layers and compares the result with the flow's velocity."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from sd3_light.config import TrainConfig
from sd3_light.config.base import recomputed_blocks
from sd3_light.core.batch import LENGTH, Batch, references
from sd3_light.core.model import Losses, TrainedModel
from sd3_light.core.objective import Prediction
from sd3_light.core.start import WeightsStart
from sd3_light.core.training import TrainingParts
from sd3_light.data.shards import CaptionFeatures
from sd3_light.families.sd3.between_blocks import BetweenBlocks, BetweenOptions
from sd3_light.families.sd3.fast.block import BlockOptions, Keep, Products
from sd3_light.families.sd3.fast.forward import FastDenoiser
from sd3_light.families.sd3.fast.row_layout import FixedText, fill_rows
from sd3_light.families.sd3.layers import Embed, LayerState, build_layers, run_layers, unpatchify
from sd3_light.families.sd3.prepare import InputPreparer
from sd3_light.flow.objective import alignment_loss
from sd3_light.flow.objectives import configured_objective
from sd3_light.model.device_copy import to_device

_LENGTHS = f"prompt{LENGTH}"
_ROWS = "prompt.rows"
_TEXT_STEP = 32  # recorded text is padded to a multiple of this
_KEEPS: dict[bool | float | str, Keep] = {False: "all", "selective": "products"}  # otherwise inputs


class SD3TrainingModule(TrainedModel):
    """The denoiser with its training loss.

    ``module(batch)`` returns the loss of a micro-batch of `InputPreparer.prepare_inputs`, its parts (means over the
    samples), and the flow loss of ``each`` sample; ``module.denoise(batch)`` returns the predicted velocity. The prompt
    has lengths exactly if the config's text is real. Without the config's draws per image all tokens run through all
    blocks, at the centre of the position table. With ``fast`` the blocks use hand-written kernels (`model/fast`).
    """

    def __init__(self, transformer: SD3Transformer2DModel, config: TrainConfig, fast: bool = False) -> None:
        super().__init__(transformer, configured_objective(config))
        self.fast = fast
        recon = config.terms.text_recon
        self.checkpointing = config.activation_checkpointing
        self.compute_dtype = getattr(torch, config.model.transformer_dtype)
        self.real_text = config.model.text_tokens == "real"
        self.target_layer = None if recon is None else recon.target_layer
        self.between_options = BetweenOptions.of(config, transformer)
        draws = {"kept": self.between_options.route, "corners": config.model.position_crop_side}
        self.image_draws = [name for name, setting in draws.items() if setting is not None]
        self.products: Products = "fp8" if config.fp8 else "plain"
        self._fast: FastDenoiser | None = None
        # a plain list: the layers share the transformer's modules and must not name its parameters twice
        self._layers = [*build_layers(transformer, self.target_layer, self.real_text)]

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """See `TrainedModel.predict`."""
        between = self._between(batch, taps)
        out = self.prediction(self.run(batch, between), batch["noisy"].shape[-2:])
        return out if between is None else replace(out, features=between.features)

    def losses(self, outputs: LayerState, batch: Batch) -> Losses:
        """Return the losses of `forward` from the last layer's outputs and the batch's target and mask."""
        return self.total(self.objective.losses(self.prediction(outputs, batch["target"].shape[-2:]), batch))

    def velocity(self, outputs: LayerState, size: Sequence[int]) -> Tensor:
        """Return the velocity of `denoise` from the last layer's outputs; ``size`` is the latent's height and width."""
        return self.prediction(outputs, size).velocity.float()

    def prediction(self, outputs: LayerState, size: Sequence[int]) -> Prediction:
        """Return the prediction from the last layer's outputs; ``size`` is the latent's height and width."""
        height, width = size
        patches, text, *rest = outputs
        extras: dict[str, Tensor] = {}
        if self.between_options.pair is not None:
            extras["compared"] = rest.pop()
        if self.target_layer is not None:
            extras |= {"text": text, "text_target": rest[-1]}
            if self.real_text:
                extras["lengths"] = rest[0]
        own = (height // 2) * (width // 2)  # the tokens of references follow
        return Prediction(unpatchify(patches[:, :own], height, width), extras=extras)

    def pipeline_layers(self) -> list[nn.Module]:
        """Return the layers as modules that run one after another, in several processes, as in `forward`."""
        return [PipelineLayer(self, layer, number) for number, layer in enumerate(self._layers)]

    def _between(self, batch: Batch, taps: Sequence[int] = ()) -> BetweenBlocks | None:
        """Return what takes the tokens between the blocks of a pass; None if nothing does."""
        last = len(self._layers) - 2
        assert all(0 < tap < last for tap in taps), f"features come from blocks 1 to {last - 1}, not {taps}"
        if not any(self.between_options) and not taps:
            return None
        return BetweenBlocks(self.between_options, batch.get("kept"), alignment_loss, taps)

    def run(self, batch: Batch, between: BetweenBlocks | None = None) -> LayerState:
        """Run all layers and return the last one's outputs, for `prediction`."""
        between = self._between(batch) if between is None else between
        if self.dropout is not None:
            self.dropout.forward(batch["noisy"].device)
        drawn = [name for name in ("kept", "corners") if name in batch.values]
        assert drawn in ([], self.image_draws), f"a batch with {drawn} instead of {self.image_draws}"
        is_real = batch.lengths("prompt") is not None or _LENGTHS in batch.values
        assert is_real == self.real_text, "exactly real text has lengths"
        run = self._run_fast if self.fast else self._run_stock
        outputs = run(batch, between)
        return outputs if between is None or between.compared is None else (*outputs, between.compared)

    def _run_stock(self, batch: Batch, between: BetweenBlocks | None) -> LayerState:
        return self.run_some(self._layers, self.inputs(batch), between)

    def inputs(self, batch: Batch) -> LayerState:
        """Return the input of the first layer."""
        noisy = batch["noisy"]
        lengths = batch.get(_LENGTHS) if _LENGTHS in batch.values else batch.lengths("prompt")
        counts = () if lengths is None else (lengths.to(noisy.device, non_blocking=True),)
        times = (1000 * batch["t"]).float()
        features = (noisy.float(), times, batch["prompt"].float(), batch["pooled"].float())
        return (*features, *counts, *batch.select(("corners",)).tensors(), *references(batch))

    def _run_fast(self, batch: Batch, between: BetweenBlocks | None) -> LayerState:
        """Return the last layer's outputs; the text stream is empty where no loss reads it."""
        noisy = batch["noisy"]
        lengths = batch.lengths("prompt")
        fast = self._fast_denoiser(noisy.device)
        times = (1000 * batch["t"]).float()
        corners = batch.select(("corners",)).tensors()
        inputs = (noisy.float(), times, batch["prompt"].to(fast.dtype), batch["pooled"], *corners)
        counts: list[int] | FixedText | None = None if lengths is None else lengths.tolist()
        if (fixed := batch.get(_LENGTHS)) is not None:
            counts = FixedText(fixed, batch.host[_ROWS])
        patches, *texts = fast.with_text(inputs, counts, self.target_layer, between)
        if not texts:
            return (patches, patches.new_empty(0))
        text, target = texts
        on_device = () if lengths is None else (lengths.to(noisy.device, non_blocking=True),)
        return (patches, text, *on_device, target)

    def recordable(self, batch: Batch) -> Batch:
        """See `TrainedModel.recordable`: the lengths of real text go to the device.

        Stock blocks mask what the prompt is padded with, and fast ones pack its rows and fill them up.
        """
        lengths = batch.lengths("prompt")
        if lengths is None:
            return batch
        longest = -(-int(lengths.max()) // _TEXT_STEP) * _TEXT_STEP
        host: dict[str, int] = {}
        if self.fast:
            lengths, host[_ROWS] = fill_rows(lengths, longest)
        padded = batch.padded_to("prompt", longest).with_values({_LENGTHS: to_device(lengths, batch["noisy"].device)})
        return replace(padded, host=host)

    def _fast_denoiser(self, device: torch.device) -> FastDenoiser:
        """Return the fast denoiser, built at first use, when the weights are on their device."""
        if self._fast is None:
            dtype = self.compute_dtype if device.type == "cuda" else torch.float32
            blocks = self.blocks()
            keep = _KEEPS.get(self.checkpointing, "inputs")
            recomputed = recomputed_blocks(self.checkpointing, len(blocks))
            options = BlockOptions(keep=keep, products=self.products, recomputed=recomputed)
            sharded = any(isinstance(block, FSDPModule) for block in blocks)
            self._fast = FastDenoiser(self.denoiser, dtype, options, sharded)
        return self._fast

    def run_some(
        self, layers: Sequence[nn.Module], state: LayerState, between: BetweenBlocks | None = None
    ) -> LayerState:
        """Run these layers in the config's compute dtype."""
        device = state[0].device
        autocast = device.type == "cuda" and self.compute_dtype != torch.float32
        with torch.autocast(device.type, self.compute_dtype, enabled=autocast):
            return run_layers(layers, state, self.checkpointing, between, self.dropout is not None)


class PipelineLayer(nn.Module):
    """One layer of a module, for a pipeline's stages; the first one takes the tensors of `Embed` in any dtype."""

    def __init__(self, module: SD3TrainingModule, layer: nn.Module, number: int) -> None:
        super().__init__()
        self.layer = layer
        self.number = number
        self._module = (module,)  # in a tuple: not a submodule of this one

    def forward(self, state: LayerState) -> LayerState:
        """Run the layer alone."""
        (module,) = self._module
        if module.dropout is not None:
            module.dropout.forward(state[0].device, self.number)
        if isinstance(self.layer, Embed):  # here, so that no process holds its inputs in float32 for all micro-batches
            state = (*(part.float() for part in state[:4]), *state[4:])
        return module.run_some([self.layer], state)


class SD3Training(TrainingParts):
    """See `TrainingParts`."""

    def preparer(self, config: TrainConfig, start: WeightsStart, empty_text: CaptionFeatures | None) -> InputPreparer:
        """See `TrainingParts.preparer`."""
        return InputPreparer.of(config.model, config.seed, empty_text, start.size.pos_embed_max_size)

    def model(self, denoiser: nn.Module, config: TrainConfig, fast: bool) -> SD3TrainingModule:
        """See `TrainingParts.model`."""
        assert isinstance(denoiser, SD3Transformer2DModel)
        return SD3TrainingModule(denoiser, config, fast)
