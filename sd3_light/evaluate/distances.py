"""Distances between two sets of feature vectors, and how well images find their captions.

x_NW: N vectors of width W, float64 on the CPU; y_MW likewise.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

METRICS = ("frechet", "kid", "precision", "recall", "retrieval", "distance")

NEIGHBOURS = 3
"""k of precision and recall (Kynkäänniemi et al. 2019)."""


def frechet_distance(x_NW: Tensor, y_MW: Tensor) -> float:
    """Return the squared Frechet distance of the Gaussians with the sets' means and covariances (Heusel et al. 2017).

    With covariances A A' and B B' the trace of the root of their product is the sum of the singular values of A'B.
    A and B come from QR decompositions, so no covariance is formed, and singular ones cause no error.
    """
    mean_x = x_NW.mean(0)
    mean_y = y_MW.mean(0)
    root_x = _root(x_NW - mean_x)
    root_y = _root(y_MW - mean_y)
    traces = root_x.square().sum() + root_y.square().sum()
    shared = torch.linalg.svdvals(root_x @ root_y.T).sum()
    return float((mean_x - mean_y).square().sum() + traces - 2 * shared)


def _root(centred_NW: Tensor) -> Tensor:
    """Return R with R'R equal to the covariance."""
    root: Tensor = torch.linalg.qr(centred_NW / float(len(centred_NW) - 1) ** 0.5, mode="r").R
    return root


def kernel_distance(x_NW: Tensor, y_MW: Tensor) -> float:
    """Return the unbiased squared MMD with the kernel (x.y / W + 1)^3 (KID, Bińkowski et al. 2018)."""
    n = len(x_NW)
    m = len(y_MW)
    kxx = _kernel(x_NW, x_NW)
    kyy = _kernel(y_MW, y_MW)
    kxy = _kernel(x_NW, y_MW)
    within_x = (kxx.sum() - kxx.trace()) / (n * (n - 1))
    within_y = (kyy.sum() - kyy.trace()) / (m * (m - 1))
    return float(within_x + within_y - 2 * kxy.mean())


def _kernel(x_NW: Tensor, y_MW: Tensor) -> Tensor:
    return (x_NW @ y_MW.T / x_NW.shape[1] + 1) ** 3


def precision_recall(true_NW: Tensor, made_MW: Tensor, neighbours: int = NEIGHBOURS) -> tuple[float, float]:
    """Return the share of made images near true ones, and of true ones near made ones.

    An image is near a set if it is within the distance of some member to its ``neighbours``-th nearest other member.
    """
    between = torch.cdist(true_NW, made_MW)
    precision = (between <= _radii(true_NW, neighbours)[:, None]).any(0).double().mean()
    recall = (between <= _radii(made_MW, neighbours)[None]).any(1).double().mean()
    return float(precision), float(recall)


def _radii(x_NW: Tensor, neighbours: int) -> Tensor:
    distances = torch.cdist(x_NW, x_NW).fill_diagonal_(0)
    return distances.kthvalue(neighbours + 1, dim=1).values  # the nearest is the vector itself


def cosine_distances(x_NW: Tensor, y_NW: Tensor) -> Tensor:
    """Return 1 minus the cosine of each pair of rows: 0 for equal directions, 1 for unrelated ones."""
    return 1 - torch.nn.functional.cosine_similarity(x_NW, y_NW, dim=1)


def finds_own_caption(images_NW: Tensor, texts_NW: Tensor, captions: Sequence[str], group: int = 100) -> Tensor:
    """Return for each image whether its own caption is the most similar of ``group`` consecutive ones, as 0 or 1.

    All rows have length 1. An equal caption of another image counts too. The last group overlaps the one before it, so
    that all images have as many candidates.
    """
    count = len(captions)
    hits = torch.zeros(len(captions), dtype=torch.float64)
    for start in range(0, count, group):
        first = max(0, min(start, count - group))
        best = (images_NW[start : start + group] @ texts_NW[first : first + group].T).argmax(1).tolist()
        for row, answer in enumerate(best, start):
            hits[row] = captions[first + answer] == captions[row]
    return hits
