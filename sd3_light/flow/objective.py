"""The flow-matching objective: the path, its velocity, the losses, and losses by time.

Every loss is a mean over samples of each sample's own mean, so averaging equal micro-batches is exact.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

NUM_BANDS = 10
BAND_NAMES = tuple(f"{band / NUM_BANDS:.1f}-{(band + 1) / NUM_BANDS:.1f}" for band in range(NUM_BANDS))
"""Bands of t, as trained (after any shift)."""


def interpolate(clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Return x_t = (1 - t) x_0 + t noise, with t of shape [B], or [B, N] for N tokens of equal size, row by row."""
    t = t.view(-1, *[1] * (clean.dim() - 1)) if t.dim() == 1 else _by_pixel(t, clean.shape)
    return (1 - t) * clean + t * noise


def _by_pixel(t: Tensor, shape: torch.Size) -> Tensor:
    """Return times of tokens [B, N] as times of latent pixels [B, 1, (frames,) height, width]."""
    *frames, height, width = shape[2:]
    side = math.isqrt(math.prod(shape[2:]) // t.shape[1])
    assert math.prod(frames) * (height // side) * (width // side) == t.shape[1], (t.shape, shape)
    grid = t.view(len(t), 1, *frames, height // side, width // side)
    return grid.repeat_interleave(side, -1).repeat_interleave(side, -2)


def velocity(clean: Tensor, noise: Tensor) -> Tensor:
    """Return dx_t / dt = noise - x_0, the model's target."""
    return noise - clean


def flow_loss(
    predicted: Tensor, target: Tensor, mask: Tensor | None = None, pseudo_huber_c: float | None = None
) -> Tensor:
    """Return the loss per sample [B]: squared or pseudo-Huber error, averaged over the sample's mask [B, H, W].

    The mask of a clip is that of each of its frames.
    """
    error = (predicted.float() - target.float()) ** 2
    if pseudo_huber_c is not None:
        # sqrt(e + c^2) - c, without the cancellation that loses errors smaller than c
        error = error / (torch.sqrt(error + pseudo_huber_c**2) + pseudo_huber_c)
    if mask is None:
        return error.flatten(1).mean(1)
    # normalised: the sum of a mask does not change the weight of its sample
    shared = error.dim() - mask.dim()
    weight = mask.float().view(len(mask), *[1] * shared, *mask.shape[1:])
    return (error * weight).flatten(1).sum(1) / (weight.flatten(1).sum(1) * math.prod(error.shape[1 : 1 + shared]))


def inside_and_outside(mask: Tensor, outside: float) -> Tensor:
    """Return the weights of a mask from 0 to 1 whose black areas count ``outside`` as much as its white ones."""
    return mask + (1 - mask) * outside


def text_reconstruction_loss(text: Tensor, target: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return the squared distance per sample [B] of text and detached target, over ``lengths`` tokens or all."""
    error = (text.float() - target.float().detach()) ** 2
    if lengths is None:
        return error.flatten(1).mean(1)
    is_real = torch.arange(text.shape[1], device=text.device) < lengths[:, None]
    return error.mean(2).masked_fill(~is_real, 0).sum(1) / lengths


def alignment_loss(early_BND: Tensor, late_BND: Tensor, mask_BN: Tensor | None = None) -> Tensor:
    """Return 1 - cosine of two blocks' tokens, the mean per sample [B]; the late ones are constants (LayerSync).

    With a mask it is the mean over the mask, and 0 for a sample whose tokens are all outside.
    """
    cosines_BN = functional.cosine_similarity(early_BND.float(), late_BND.float().detach(), dim=-1)
    if mask_BN is None:
        return 1 - cosines_BN.mean(1)
    share_BN = mask_BN / mask_BN.sum(1, keepdim=True).clamp(min=torch.finfo(mask_BN.dtype).tiny)
    return ((1 - cosines_BN) * share_BN).sum(1)


def sum_by_band(each_B: Tensor, time_B: Tensor) -> Tensor:
    """Return [2, bands]: the sum of losses and the number of samples in each band of time in [0, 1]."""
    band_B = (time_B * NUM_BANDS).long().clamp(0, NUM_BANDS - 1)
    member_BN = band_B[:, None] == torch.arange(NUM_BANDS, device=band_B.device)
    # where() instead of a product: a non-finite loss must stay in its band
    losses_N = torch.where(member_BN, each_B.detach().float()[:, None], 0).sum(0)
    return torch.stack([losses_N, member_BN.sum(0).float()])
