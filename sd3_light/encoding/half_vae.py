"""The VAE's encoder in half precision: channels last, with biases, GroupNorm, SiLU and residual sums in few passes.

Half precision is used only where it does not matter: its error is measured on test images and must stay below the noise
that the latents have anyway. The decoder stays in float32.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from subprocess import SubprocessError
from typing import Any, Literal

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.nn import functional as F

from sd3_light.config.faults import UserError
from sd3_light.encoding.vae import encode_pixels, load_vae, vae_class
from sd3_light.runlog import info

VaeDtype = Literal["auto", "float32", "float16", "bfloat16"]
ERROR_LIMIT = 0.5
"""Largest accepted error, as a share of the latents' own noise: it adds 12% to the noise's standard deviation."""
PROBE_SIDE = 256
PROBE_IMAGES = 4

# --- which precision ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PrecisionError:
    """Root mean squares over the latents' means: the error of a precision, and the noise that they have anyway."""

    error: float
    posterior: float
    """The posterior's standard deviation."""
    rounding: float
    """The change if pixels are not rounded to 8 bits."""

    @property
    def share(self) -> float:
        """The error relative to the larger noise; NaN if the encoder overflowed."""
        return self.error / max(self.posterior, self.rounding)


def resolve_vae_dtype(setting: VaeDtype, diffusers_path: Path, device: torch.device) -> torch.dtype:
    """Return the VAE's dtype on a device: float32 on CPUs; ``auto`` is float16 on GPUs where it is precise enough.

    Only SD3's and Flux's class has kernels for it; ``auto`` is float32 for the others.
    """
    if device.type != "cuda":
        return torch.float32
    if vae_class(diffusers_path) is not AutoencoderKL:
        plain: torch.dtype = torch.float32 if setting == "auto" else getattr(torch, setting)
        return plain
    has_triton = find_spec("triton") is not None
    if setting not in ("auto", "float32") and not has_triton:
        raise UserError(
            f'model.vae_dtype = "{setting}" needs Triton, which is not installed; write "auto" or "float32"'
        )
    if setting != "auto":
        dtype: torch.dtype = getattr(torch, setting)
        return dtype
    if not has_triton or torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float32
    measured = _try_precision(diffusers_path, device)
    if isinstance(measured, str):
        info(f"the VAE computes in float32: its float16 kernels do not run on this GPU ({measured})")
        return torch.float32
    is_precise = measured.share < ERROR_LIMIT  # false for NaN
    result = "float16" if is_precise else "float32; float16 is not precise enough"
    info(f"the VAE computes in {result}: its error is {measured.share:.1%} of the latents' own noise")
    return torch.float16 if is_precise else torch.float32


def _try_precision(diffusers_path: Path, device: torch.device) -> PrecisionError | str:
    """Measure float16; return the error if its kernels do not compile or run here, as without a C compiler."""
    try:
        return measure_precision(diffusers_path, device, torch.float16)
    except torch.OutOfMemoryError:  # of a GPU that others fill: says nothing about the kernels
        raise
    except (_triton_error(), RuntimeError, OSError, SubprocessError) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _triton_error() -> type[Exception]:
    from triton.errors import TritonError

    error: type[Exception] = TritonError
    return error


def measure_precision(diffusers_path: Path, device: torch.device, dtype: torch.dtype) -> PrecisionError:
    """Compare the encoder in ``dtype`` with float32 on test images."""
    pixels = probe_pixels().to(device)
    exact = load_vae(diffusers_path, device, torch.float32)
    with torch.inference_mode():
        mean, logvar = encode_pixels(exact, pixels, tf32=False).chunk(2, dim=1)
        noise = torch.rand(pixels.shape, generator=torch.Generator().manual_seed(0)).to(device) - 0.5
        unrounded = encode_pixels(exact, pixels + noise, tf32=False).chunk(2, dim=1)[0]
        rounded = encode_pixels(to_half_encoder(exact, dtype), pixels).chunk(2, dim=1)[0].float()
    return PrecisionError(_rms(rounded - mean), _rms(torch.exp(0.5 * logvar)), _rms(unrounded - mean))


def probe_pixels() -> Tensor:
    """Return test images with smooth, noisy and flat parts: uint8 [B, H, W, 3]."""
    random = np.random.default_rng(0)
    coarse = torch.from_numpy(random.uniform(-60, 315, (PROBE_IMAGES, 3, 9, 9))).float()
    smooth = F.interpolate(coarse, (PROBE_SIDE, PROBE_SIDE), mode="bicubic")
    grain = torch.from_numpy(random.normal(0, 12, smooth.shape)).float()
    grain[..., : PROBE_SIDE // 2] = 0
    return (smooth + grain).clamp(0, 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


# --- the encoder -------------------------------------------------------------------------------


def load_encoding_vae(diffusers_path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Load the VAE with its encoder in ``dtype``."""
    if vae_class(diffusers_path) is not AutoencoderKL:
        return load_vae(diffusers_path, device, dtype)
    vae = load_vae(diffusers_path, device, torch.float32)
    return vae if dtype == torch.float32 else to_half_encoder(vae, dtype)


def to_half_encoder(vae: AutoencoderKL, dtype: torch.dtype) -> AutoencoderKL:
    """Convert the VAE's encoder in place; norms and biases that are added to sums stay in float32."""
    encoder: Any = vae.encoder
    for block in (*encoder.down_blocks, encoder.mid_block):
        for index, resnet in enumerate(block.resnets):
            if _is_plain(resnet):
                block.resnets[index] = _HalfResnet(resnet, dtype)
    if isinstance(encoder.conv_norm_out, nn.GroupNorm) and isinstance(encoder.conv_act, nn.SiLU):
        encoder.conv_norm_out = _NormSilu(encoder.conv_norm_out)
        encoder.conv_act = nn.Identity()
    parts: list[Any] = [encoder, *filter(None, [vae.quant_conv])]
    for module in (module for part in parts for module in part.modules()):
        if isinstance(module, nn.Conv2d | nn.Linear | nn.GroupNorm):
            nn.Module.to(module, dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return vae


def _is_plain(resnet: Any) -> bool:
    """Return whether a block is one of SD3's VAE: two norms, SiLUs and convolutions, and a sum."""
    return (
        isinstance(resnet, ResnetBlock2D)
        and all(isinstance(norm, nn.GroupNorm) for norm in (resnet.norm1, resnet.norm2))
        and isinstance(resnet.nonlinearity, nn.SiLU)
        and resnet.time_emb_proj is None
        and resnet.upsample is None
        and resnet.downsample is None
        and resnet.output_scale_factor == 1
    )


class _NormSilu(nn.Module):
    """silu(group_norm(x + bias)), where ``bias`` is that of the convolution before it."""

    def __init__(self, norm: nn.GroupNorm, bias: Tensor | None = None) -> None:
        super().__init__()
        self.groups = norm.num_groups
        self.eps = norm.eps
        self.register_buffer("weight", norm.weight.detach().clone())
        self.register_buffer("shift", norm.bias.detach().clone())
        self.register_buffer("bias", torch.zeros_like(norm.bias) if bias is None else bias.detach().clone())

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the activations in the dtype of ``x_BCHW``."""
        norm_silu = _operations(x_BCHW).norm_silu
        activated: Tensor = norm_silu(x_BCHW, self.bias, self.groups, self.weight, self.shift, self.eps)
        return activated


class _HalfResnet(nn.Module):
    """A residual block whose biases are added where its activations are read anyway."""

    def __init__(self, block: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = _NormSilu(block.norm1)
        self.norm2 = _NormSilu(block.norm2, block.conv1.bias)
        bias = block.conv2.bias.detach().clone()
        self.conv1 = block.conv1
        self.conv2 = block.conv2
        self.shortcut = block.conv_shortcut
        if self.shortcut is not None:
            bias += self.shortcut.bias.detach()
        self.register_buffer("bias", bias)
        for convolution in (self.conv1, self.conv2, self.shortcut):
            if convolution is not None:
                convolution.bias = None

    def forward(self, x_BCHW: Tensor, temb: None = None) -> Tensor:
        """Return the block's output; ``temb`` is always None in a VAE."""
        hidden = self.conv2(self.norm2(self.conv1(self.norm1(x_BCHW))))
        residual = x_BCHW if self.shortcut is None else self.shortcut(x_BCHW)
        total: Tensor = _operations(hidden).add(hidden, residual, self.bias)
        return total


def _operations(x: Tensor) -> Any:
    """Return the kernels on GPUs and their torch versions elsewhere."""
    if not x.is_cuda:
        return TorchOperations
    from sd3_light.encoding import vae_kernels

    return vae_kernels


class TorchOperations:
    """The torch versions of the kernels."""

    @staticmethod
    def norm_silu(x_BCHW: Tensor, bias: Tensor, groups: int, weight: Tensor, shift: Tensor, eps: float) -> Tensor:
        """Return silu(group_norm(x + bias))."""
        normed = F.group_norm(x_BCHW.float() + bias[:, None, None], groups, weight, shift, eps)
        return F.silu(normed).to(x_BCHW.dtype)

    @staticmethod
    def add(x_BCHW: Tensor, y_BCHW: Tensor, bias: Tensor) -> Tensor:
        """Return x + y + bias."""
        return (x_BCHW.float() + y_BCHW.float() + bias[:, None, None]).to(x_BCHW.dtype)
