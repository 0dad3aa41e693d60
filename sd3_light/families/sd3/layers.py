"""The MMDiT as a list of layers: embed, N joint blocks, output.

The list runs the modules of a stock `SD3Transformer2DModel` and equals its forward bit for bit in float32. Pipeline
parallelism cuts the same list, so layers pass tuples of tensors. With real text tokens, lengths give the number of real
text rows per sample, and the values of the other rows change nothing. Shapes: B samples, C channels, H x W latent,
N image tokens, T text tokens, D width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sd3_light.config.base import Checkpointing, recomputed_blocks
from sd3_light.core.model import save_products
from sd3_light.families.sd3.between_blocks import BetweenBlocks
from sd3_light.families.sd3.masked_attention import mask_attention
from sd3_light.families.sd3.real_pipeline import RealTextAttention, marked
from sd3_light.model.host_inputs import checkpoint_on_host

LayerState = tuple[Tensor, ...]
"""(image_BND, text_BTD, time_BD), with real text lengths_B (int64), and with text reconstruction the tokens to
reconstruct. Only the first three have gradients."""


class Embed(nn.Module):
    """Maps (noisy_BCHW, timestep_B, prompt_BTE, pooled_BP[, lengths_B][, corners_B2], *references) to a LayerState.

    ``corners_B2`` are the rows and columns where each sample's crop of the position table begins. References are
    latents [B, C, H, W], whose tokens follow those of the image.
    """

    def __init__(self, transformer: SD3Transformer2DModel, keep_text: bool = False, real_text: bool = False) -> None:
        super().__init__()
        self.pos_embed = transformer.pos_embed
        self.time_text_embed = transformer.time_text_embed
        self.context_embedder = transformer.context_embedder
        self.keep_text = keep_text
        self.real_text = real_text

    def forward(self, inputs: LayerState) -> LayerState:
        """Embed patches with positions, text, and time with pooled text."""
        noisy_BCHW, timestep_B, prompt_BTE, pooled_BP, *rest = inputs
        lengths = rest[: self.real_text]
        others = rest[self.real_text :]
        corners = [other for other in others if other.dim() == 2]
        images = [noisy_BCHW, *(other for other in others if other.dim() == 4)]
        tokens = [embed_patches(self.pos_embed, image, *corners) for image in images]
        image_BND = torch.cat(marked(tokens), dim=1) if len(tokens) > 1 else tokens[0]
        time_BD = self.time_text_embed(timestep_B, pooled_BP)
        text_BTD = self.context_embedder(prompt_BTE)
        target = (text_BTD.detach(),) if self.keep_text else ()
        return (image_BND, text_BTD, time_BD, *lengths, *target)


def embed_patches(embed: Any, noisy_BCHW: Tensor, corners_B2: Tensor | None = None) -> Tensor:
    """Return the patches [B, N, D] with positions: the centre of the table, or each sample's crop of it."""
    if corners_B2 is None:
        return embed(noisy_BCHW).contiguous()  # type: ignore[no-any-return]
    patches_BDHW = embed.proj(noisy_BCHW)
    rows, columns = (torch.arange(count, device=noisy_BCHW.device) for count in patches_BDHW.shape[-2:])
    top_B11, left_B11 = corners_B2.long()[:, :, None, None].unbind(1)
    places_BHW = (top_B11 + rows[:, None]) * embed.pos_embed_max_size + left_B11 + columns
    positions_BND = embed.pos_embed[0][places_BHW.flatten(1)]
    return (patches_BDHW.flatten(2).transpose(1, 2) + positions_BND).to(patches_BDHW.dtype)  # type: ignore[no-any-return]


class JointBlock(nn.Module):
    """One joint block; the last block has no text output and passes its text input through."""

    def __init__(self, block: nn.Module, keep_text: bool = False, real_text: bool = False) -> None:
        super().__init__()
        self.block = block
        self.keep_text = keep_text
        self.real_text = real_text

    def forward(self, state: LayerState) -> LayerState:
        """Run the joint block."""
        image_BND, text_BTD, time_BD, *rest = state
        block: Any = self.block
        is_masked = isinstance(block.attn.processor, RealTextAttention)
        assert is_masked or not self.real_text, "the stock processor would attend to padded text"
        text_out, image_BND = block(
            hidden_states=image_BND,
            encoder_hidden_states=text_BTD,
            temb=time_BD,
            joint_attention_kwargs={"text_lengths": rest[0]} if self.real_text else None,
        )
        text_BTD = text_BTD if text_out is None else text_out
        if self.keep_text:
            rest.append(text_BTD.detach())
        return (image_BND, text_BTD, time_BD, *rest)


class Output(nn.Module):
    """Maps a LayerState to (patches_BNP, text_BTD, *rest): the predicted patches, and the texts to compare."""

    def __init__(self, transformer: SD3Transformer2DModel) -> None:
        super().__init__()
        self.norm_out = transformer.norm_out
        self.proj_out = transformer.proj_out

    def forward(self, state: LayerState) -> LayerState:
        """Apply the final modulated norm and projection."""
        image_BND, text_BTD, time_BD, *rest = state
        return (self.proj_out(self.norm_out(image_BND, time_BD)), text_BTD, *rest)


def build_layers(
    transformer: SD3Transformer2DModel, text_target_layer: int | None = None, real_text: bool = False
) -> list[nn.Module]:
    """Return the layers of a stock transformer; they share its modules.

    ``text_target_layer`` k keeps the text tokens after block k (0: after the context embedder) for reconstruction; the
    last text output cannot be a target. With ``real_text`` inputs contain lengths, and the transformer's attention
    applies masks from now on.
    """
    blocks = list(transformer.transformer_blocks)
    assert text_target_layer is None or 0 <= text_target_layer < len(blocks) - 1, text_target_layer
    if real_text:
        mask_attention(transformer)
    layers: list[nn.Module] = [Embed(transformer, text_target_layer == 0, real_text)]
    for number, block in enumerate(blocks, start=1):
        layers.append(JointBlock(block, text_target_layer == number, real_text))
    return [*layers, Output(transformer)]


def run_layers(
    layers: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    checkpointing: Checkpointing = False,
    between: BetweenBlocks | None = None,
    draws: bool = False,
) -> LayerState:
    """Run the layers in order and return the last state; ``draws``: they draw random numbers.

    With ``checkpointing`` the backward pass recomputes the blocks' activations: all, those of the first blocks, or with
    ``"selective"`` all except the outputs of matrix products and attention; with ``"host"`` from inputs in host memory.
    ``between``, for the whole list of layers, gets the image tokens between them.
    """
    blocks = [layer for layer in layers if isinstance(layer, JointBlock)]
    recomputed = recomputed_blocks(checkpointing, len(blocks)) if torch.is_grad_enabled() else 0
    recomputing = set(blocks[:recomputed])
    context: dict[str, Any] = {"context_fn": save_products} if checkpointing == "selective" else {}
    state: Any = tuple(inputs)
    for number, layer in enumerate(layers):
        if layer not in recomputing:
            state = layer(state)
        elif checkpointing == "host":
            state = checkpoint_on_host(_together(layer), *state, preserve_rng_state=draws)
        else:
            state = checkpoint(layer, state, use_reentrant=False, preserve_rng_state=draws, **context)
        if between is not None and between.acts_after(number):
            state = (between.after(number, state[0]), *state[1:])
    return tuple(state)


def _together(layer: nn.Module) -> Callable[..., Any]:
    return lambda *state: layer(state)


def unpatchify(patches_BNP: Tensor, height: int, width: int, patch: int = 2) -> Tensor:
    """Return predicted patches as a latent [B, C, height, width]."""
    rows = height // patch
    columns = width // patch
    patches = patches_BNP.reshape(len(patches_BNP), rows, columns, patch, patch, -1)
    return torch.einsum("nhwpqc->nchpwq", patches).reshape(len(patches_BNP), -1, height, width)
