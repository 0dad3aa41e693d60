"""Losses by time: ten bands of t, as trained (after any shift)."""

import torch
from torch import Tensor

NUM_BANDS = 10
BAND_NAMES = tuple(f"{band / NUM_BANDS:.1f}-{(band + 1) / NUM_BANDS:.1f}" for band in range(NUM_BANDS))


def sum_by_band(each_B: Tensor, time_B: Tensor) -> Tensor:
    """Return [2, bands]: the sum of losses and the number of samples in each band of time in [0, 1]."""
    band_B = (time_B * NUM_BANDS).long().clamp(0, NUM_BANDS - 1)
    member_BN = band_B[:, None] == torch.arange(NUM_BANDS, device=band_B.device)
    # where() instead of a product: a non-finite loss must stay in its band
    losses_N = torch.where(member_BN, each_B.detach().float()[:, None], 0).sum(0)
    return torch.stack([losses_N, member_BN.sum(0).float()])
