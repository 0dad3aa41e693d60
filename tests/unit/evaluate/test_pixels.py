"""PSNR and edge agreement: known values, and what they punish."""

import numpy as np
import pytest

from sd3_light.evaluate.pixels import MAX_PSNR, edge_agreement, pixel_scores, psnr
from sd3_light.sources.preprocess import Pixels


def square(left: int, colour: int = 0, paper: int = 255) -> Pixels:
    image = np.full((64, 64, 3), paper, np.uint8)
    image[20:44, left : left + 24] = colour
    return image


def test_pixel_scores_have_known_values() -> None:
    black = np.zeros((8, 8, 3), np.uint8)
    assert psnr(black, black) == MAX_PSNR
    assert psnr(black, black + 255) == pytest.approx(0)
    assert psnr(black, black + 51) == pytest.approx(20 * np.log10(5))
    truth = square(20)
    assert edge_agreement(truth, truth) == pytest.approx(1)
    assert edge_agreement(square(20, 255, 0), truth) == pytest.approx(1), "an inverted image has the same edges"
    near, far = edge_agreement(square(21), truth), edge_agreement(square(40), truth)
    assert 0.7 < near < 1
    assert far < 0.5 * near
    assert edge_agreement(np.full((64, 64, 3), 7, np.uint8), truth) == 0
    noise = np.random.default_rng(0).permutation(truth.reshape(-1, 3)).reshape(truth.shape)
    assert abs(edge_agreement(noise, truth)) < 0.15
    scores = pixel_scores([square(20)[::2, ::2], square(20)], [square(20), square(20)])
    assert scores["psnr"][0] > 15
    assert scores["psnr"][1] == MAX_PSNR
    assert scores["edges"].min() > 0.8
