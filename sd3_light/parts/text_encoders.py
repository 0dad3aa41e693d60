"""The three text encoders in the classes that SD3 uses: built from a size, with outputs of unit scale."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerBase, T5Config, T5EncoderModel

from sd3_light.families.sd3.text import encode_clip, encode_t5
from sd3_light.parts.sizes import TextSize


def build_clip(
    tokenizer: PreTrainedTokenizerBase, width: int, layers: int, heads: int, activation: str
) -> CLIPTextModelWithProjection:
    """Build a CLIP text encoder. Its last layer serves only the pooled output: SD3 uses the tokens before it."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width, projection_dim=width,
        num_hidden_layers=layers, num_attention_heads=heads, hidden_act=activation,
        max_position_embeddings=tokenizer.model_max_length, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = CLIPTextModelWithProjection(config)
    init_weights(model)
    return model.eval()


def build_t5(tokenizer: PreTrainedTokenizerBase, width: int, layers: int, heads: int, inner: int) -> T5EncoderModel:
    """Build a T5 encoder with the gated GELU of T5-v1.1 and heads of 64."""
    config = T5Config(
        vocab_size=len(tokenizer), d_model=width, d_kv=64, num_heads=heads, d_ff=inner, num_layers=layers,
        feed_forward_proj="gated-gelu", relative_attention_num_buckets=32, relative_attention_max_distance=128,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
        dropout_rate=0.0, use_cache=False, is_encoder_decoder=False,
    )  # fmt: skip
    model = T5EncoderModel(config)
    init_weights(model)
    return model.eval()


@torch.no_grad()
def init_weights(model: nn.Module) -> None:
    """Initialize embeddings at unit scale (the usual 0.02 would hide the words), and layers that add about the same."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            module.weight.normal_(std=0.5 if "position" in name else 1.0)
        elif isinstance(module, nn.Linear):
            is_residual = name.endswith((".out_proj", ".fc2", ".o", ".wo"))
            module.weight.normal_(std=(0.5 if is_residual else 1.0) * module.in_features**-0.5)
            if name.endswith(".q"):
                module.weight.mul_(64**-0.5)  # T5 does not divide by the root of the head width
            if module.bias is not None:
                module.bias.zero_()


def build_encoders(
    size: TextSize, tokenizers: dict[str, PreTrainedTokenizerBase], seed: int
) -> tuple[CLIPTextModelWithProjection, CLIPTextModelWithProjection, T5EncoderModel]:
    """Build the three encoders of a size with random weights."""
    first, second, third = tokenizers.values()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (
            build_clip(first, size.clip_l, size.layers, num_heads(size.clip_l), "quick_gelu"),
            build_clip(second, size.clip_g, size.layers, num_heads(size.clip_g), "gelu"),
            build_t5(third, size.t5, size.layers, size.t5 // 64, 2 * size.t5),
        )


def num_heads(width: int) -> int:
    """Return the number of heads of 64, or of 32 where those do not divide the width."""
    return width // 64 if width % 64 == 0 else width // 32


def encode(model: Any, ids_BL: Tensor, lengths_B: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the outputs that SD3 uses: tokens [B, L, W], and CLIP's pooled vector [B, W].

    ``lengths_B``: T5 attends to this many tokens of each caption only. CLIP is causal and needs no mask.
    """
    if isinstance(model, T5EncoderModel):
        return encode_t5(model, ids_BL, lengths_B), None
    return encode_clip(model, ids_BL)


@torch.no_grad()
def scale_outputs(model: Any, tokens: Tensor, pooled: Tensor | None) -> None:
    """Change the weights so that these outputs, which the model returned, would have unit scale."""
    if pooled is None:
        model.encoder.final_layer_norm.weight.div_(tokens.flatten(0, 1).square().mean(0).sqrt())
        return
    gain = tokens.square().mean().rsqrt()
    for name, parameter in model.named_parameters():
        # everything added to the residual stream; layers read it through a norm, which removes the factor
        if "embedding" in name or ".out_proj." in name or ".fc2." in name:
            parameter.mul_(gain)
    model.text_projection.weight.div_(pooled.square().mean(0).sqrt()[:, None])
