"""Losses by where on the path they were measured: ten bands of the time t, as trained (after any shift)."""

import torch
from torch import Tensor

NUM_BANDS = 10
BAND_NAMES = tuple(f"{at / NUM_BANDS:.1f}-{(at + 1) / NUM_BANDS:.1f}" for at in range(NUM_BANDS))


def sum_by_band(each_B: Tensor, time_B: Tensor) -> Tensor:
    """[2, bands]: the sum of the samples' losses in each band of time in [0, 1], and how many samples it had."""
    band_B = (time_B * NUM_BANDS).long().clamp(0, NUM_BANDS - 1)
    member_BN = band_B[:, None] == torch.arange(NUM_BANDS, device=band_B.device)
    # not a product: a loss that is not finite must stay in its own band
    losses_N = torch.where(member_BN, each_B.detach().float()[:, None], 0).sum(0)
    return torch.stack([losses_N, member_BN.sum(0).float()])
