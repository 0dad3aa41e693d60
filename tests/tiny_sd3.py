"""A tiny random SD3 pipeline of the real classes, made in the process."""

from typing import Any

import torch

WORDS = ["a", "two", "small", "large", "red", "green", "blue", "circle", "squares", "star", "black", "left", "of"]


def _clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    vocab = {"<|startoftext|>": 0, "<|endoftext|>": 1}
    for letter in "abcdefghijklmnopqrstuvwxyz":
        vocab[letter] = len(vocab)
        vocab[f"{letter}</w>"] = len(vocab)
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def _t5_tokenizer() -> Any:
    from transformers import T5TokenizerFast

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -9.0)]
    return T5TokenizerFast(vocab=[*special, *((f"▁{word}", -2.0) for word in WORDS)], extra_ids=0)


def _clip(vocab: int, width: int, projection: int) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    sizes = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": 2 * width, "projection_dim": projection}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return CLIPTextModelWithProjection(CLIPTextConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, **special))


def _t5(vocab: int) -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=vocab, d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4))


def _transformer() -> Any:
    from diffusers import SD3Transformer2DModel

    sizes = {"sample_size": 16, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    sizes |= {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 48, "pos_embed_max_size": 24}
    sizes |= {"caption_projection_dim": 32, "pooled_projection_dim": 40}
    model = SD3Transformer2DModel(**sizes, qk_norm="rms_norm")
    for parameter in model.parameters():  # with small initial values the text hardly affects the image
        torch.nn.init.normal_(parameter, std=0.15)
    return model


def _vae() -> Any:
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    sizes = {"block_out_channels": (8, 8, 8), "latent_channels": 4, "norm_num_groups": 4, "layers_per_block": 1}
    latents = {"use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 1.2, "shift_factor": 0.1}
    return AutoencoderKL(**blocks, **sizes, **latents)


def tiny_pipeline() -> Any:
    """Make a `StableDiffusion3Pipeline` whose sides are multiples of 8, up to 192."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    with torch.random.fork_rng():
        torch.manual_seed(0)
        clip, t5 = _clip_tokenizer(), _t5_tokenizer()
        pipeline = StableDiffusion3Pipeline(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_vae(),
            text_encoder=_clip(len(clip), 16, 16),
            tokenizer=clip,
            text_encoder_2=_clip(len(clip), 24, 24),
            tokenizer_2=clip,
            text_encoder_3=_t5(len(t5)),
            tokenizer_3=t5,
        )
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        getattr(pipeline, name).eval()
    return pipeline


def perturbed(config: dict[str, Any], seed: int = 0, scale: float = 0.05) -> Any:
    """Make an SD3 denoiser of the package in which every weight matters: gates and output are not zero."""
    from sd3_light.families.sd3.random_weights import new_transformer

    transformer = new_transformer(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return transformer
