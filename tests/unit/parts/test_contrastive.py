"""Text encoders trained against the image tower, and the judge that remains."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedTokenizerBase

from sd3_light.evaluate.feature_model import load_feature_model, save_feature_model
from sd3_light.parts.contrastive import CaptionedImages, TextOptions, TextTask, Towers, augment, captioned_images
from sd3_light.parts.images import Pool
from sd3_light.parts.sizes import TextSize
from sd3_light.parts.text_encoders import encode
from sd3_light.parts.tokenizers import learn_tokenizers
from tests.refusals import refused

CPU = torch.device("cpu")
SIZE = TextSize(32, 32, 64, 2, (8, 16, 32, 64), (1, 1, 1, 1))
Tokenizers = dict[str, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def tokenizers(pools: list[Pool]) -> Tokenizers:
    return learn_tokenizers(sorted({text for texts in pools[0].captions for text in texts}), 2000)


@pytest.fixture(scope="module")
def images(pools: list[Pool], tokenizers: Tokenizers) -> CaptionedImages:
    return captioned_images(pools, tokenizers, CPU)


@pytest.fixture(scope="module")
def task(images: CaptionedImages, tokenizers: Tokenizers) -> TextTask:
    return TextTask(Towers(SIZE, tokenizers, 32, 0), images, CPU, TextOptions(batch=24))


def test_captions_follow_their_images(images: CaptionedImages, pools: list[Pool]) -> None:
    (pool,) = pools
    assert images.held_out == pool.held_out
    assert torch.equal(images.pixels, pool.pixels)  # already squares of that size
    for row in (0, 5, 63):
        assert images.texts[images.first[row] : images.first[row + 1]] == pool.captions[row]
    assert images.lengths.min() > 1


def test_the_judge_agrees(task: TextTask, tokenizers: Tokenizers, tmp_path: Path) -> None:
    save_feature_model(task.judge(), tokenizers["tokenizer_2"], 32, tmp_path)
    judge = load_feature_model(tmp_path, CPU)
    texts = list(task.data.texts[:6])
    expected = task.towers.text_vector(1, task.data.ids[1][:6], task.data.lengths[:6], masked=True)
    assert torch.allclose(judge.text_features(texts), expected, atol=1e-5)
    task.towers.eval()
    features = task.towers.projections[1](task._image_features())
    images = task.data.pixels[: task.data.held_out]
    assert torch.allclose(judge.image_features(images), torch.nn.functional.normalize(features, dim=-1), atol=1e-5)
    assert judge.image_features(np.zeros((2, 40, 48, 3), np.uint8)).shape == (2, 32)
    assert type(AutoModel.from_pretrained(tmp_path)).__name__ == "VisionTextDualEncoderModel"
    (tmp_path / "preprocessor_config.json").write_text("{}")
    refused("no size, image_mean and image_std", load_feature_model, tmp_path, CPU)


class Directions(nn.Module):
    """Towers whose vectors are known: an image of grey g has the vector ``image_of[g]``, a caption of token c
    ``text_of[c]``. All three encoders are equal; the vectors of the first are compared as they are."""

    def __init__(self, image_of: Tensor, text_of: Tensor) -> None:
        super().__init__()
        self.image_of, self.text_of = image_of, text_of
        self.projections = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        for layer in self.projections:
            layer.weight.data.copy_(torch.eye(2))
        self.scales = nn.Parameter(torch.zeros(3))
        self.images: list[Tensor] = []
        self.captions: list[list[int]] = []
        self.masked: list[bool] = []
        self.modes: list[bool] = []

    def image(self, images: Tensor) -> SimpleNamespace:
        self.images.append(images)
        self.modes.append(self.training)
        values = ((images[:, 0, 16, 16] + 1) * 127.5).round().long()
        return SimpleNamespace(pooler_output=self.image_of[values])

    def text_vector(self, index: int, ids: Tensor, lengths: Tensor, masked: bool) -> Tensor:
        self.captions.append(ids[:, 0].tolist())
        self.masked.append(masked)
        return self.text_of[ids[:, 0]]

    def rows(self) -> list[list[int]]:
        """The images of each batch, by their grey."""
        return [((images[:, 0, 16, 16] + 1) * 127.5).round().int().tolist() for images in self.images]


def numbered(count: int, held_out: int, captions: int = 1, texts: Sequence[str] | None = None) -> CaptionedImages:
    """Image i is of grey i and has the captions ``captions * i`` and following, of one token each."""
    pixels = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, 32, 32, 3)
    total = captions * count
    ids = torch.arange(total)[:, None].expand(total, 4)
    words = tuple(texts or map(str, range(total)))
    first, lengths = np.arange(0, total + 1, captions), torch.ones(total, dtype=torch.long)
    return CaptionedImages(pixels, words, first, (ids, ids, ids), lengths, held_out)


def circle(degrees: Sequence[float]) -> Tensor:
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], 1).float()


def cross_entropy(logits: np.ndarray) -> float:
    """The mean of -log softmax(row i)[i]."""
    return float(np.mean([np.log(np.exp(row).sum()) - row[number] for number, row in enumerate(logits)]))


def text_task(towers: nn.Module, data: CaptionedImages, **options: int) -> TextTask:
    return TextTask(towers, data, CPU, TextOptions(**options))  # type: ignore[arg-type]


def test_batches_have_training_images_by_seed() -> None:
    towers = Directions(circle([0] * 40), circle([0] * 80))
    task = text_task(towers, numbered(40, held_out=10, captions=2), batch=12)
    for step in (0, 1, 2, 3, 0):
        task.loss(step)
    rows = towers.rows()
    assert all(len(set(batch)) == 12 and min(batch) >= 10 for batch in rows)
    assert len({number for batch in rows for number in batch}) > 20
    assert rows[0] == rows[4]
    assert len({*map(tuple, rows)}) == 4, "every step draws its own images"
    captions = towers.captions[::3]
    for batch, chosen in zip(rows, captions, strict=True):
        assert [caption // 2 for caption in chosen] == batch, "an image comes with one of its captions"
    assert {caption % 2 for chosen in captions for caption in chosen} == {0, 1}
    assert captions == towers.captions[1::3] == towers.captions[2::3], "all encoders see the same captions"
    assert towers.masked == [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3
    towers = Directions(circle([0] * 12), circle([0] * 12))
    text_task(towers, numbered(12, held_out=3), batch=100).loss(0)
    assert sorted(towers.rows()[0]) == list(range(3, 12))
    towers = Directions(circle([0] * 40), circle([0] * 40))
    for seed in (0, 1):
        text_task(towers, numbered(40, held_out=0), batch=12, seed=seed).loss(0)
    first, second = towers.rows()
    assert first != second


def test_training_images_are_augmented() -> None:
    data = numbered(8, held_out=0)
    pixels = torch.randint(0, 255, (8, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    towers = Directions(circle([0] * 256), circle([0] * 8))
    task = text_task(towers, replace(data, pixels=pixels), batch=8)
    task.loss(0)
    task.loss(1)
    originals = (pixels.permute(0, 3, 1, 2).float() / 127.5 - 1).flatten(1)
    assert torch.cdist(towers.images[0].flatten(1), originals).min() > 1


def test_the_loss_compares_directions_and_leaves_equal_captions_out() -> None:
    """Vectors on a circle, so that the cosine of each pair is known; one encoder has another temperature."""
    images, texts = (0.0, 20.0, 90.0, 200.0), (10.0, 50.0, 60.0, 300.0)
    towers = Directions(circle(images), circle(texts))
    towers.scales.data[:] = torch.tensor([0.0, 1.0, 9.0])  # of which 100 is the limit: log(100) < 9
    loss, _ = text_task(towers, numbered(4, held_out=0), batch=4).loss(0)
    cosines = np.cos(np.radians(np.subtract.outer(images, texts)))
    losses = [(cross_entropy(f * cosines) + cross_entropy(f * cosines.T)) / 2 for f in (1, math.e, 100)]
    assert cross_entropy(cosines) != pytest.approx(cross_entropy(cosines.T), abs=0.01)
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-4)
    images = circle([0.0, 20.0, 90.0, 200.0])
    data = numbered(4, held_out=0)
    losses = []
    for factor in (1.0, 7.0):
        towers = Directions(factor * images, circle([10.0, 50.0, 60.0, 300.0]))
        losses.append(text_task(towers, data, batch=4).loss(0)[0].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    # images 0 and 1 have the same caption: each is compared with its own and the two others.
    images, texts = (0.0, 20.0, 90.0, 200.0), (10.0, 10.0, 60.0, 300.0)
    data = numbered(4, held_out=0)
    ids = torch.tensor([0, 0, 2, 3])[:, None].expand(4, 4)
    towers = Directions(circle(images), circle(texts))
    loss, _ = text_task(towers, replace(data, ids=(ids, ids, ids)), batch=4).loss(0)
    cosines = np.cos(np.radians(np.subtract.outer(images, texts)))
    cosines[0, 1] = cosines[1, 0] = -np.inf
    assert loss.item() == pytest.approx((cross_entropy(cosines) + cross_entropy(cosines.T)) / 2, rel=1e-4)


def test_retrieval_is_among_100_captions_of_all_encoders() -> None:
    """150 held-out images: the first 100 choose among the first 100 captions, the others among the last 100."""
    captions = [0.5 * number for number in range(150)]
    images = list(captions)
    images[5] = captions[120]  # wrong: 99 is the nearest of its group
    images[7] = captions[7] + 0.2  # right: 7 is the nearest
    images[40] = captions[41]  # right: 41 is the same text
    images[130] = captions[131]  # wrong
    images[149] = captions[20]  # wrong: 50 is the nearest of its group
    images[100] = captions[60]  # wrong: the last group is as large as the first
    texts = [str(number) for number in range(160)]
    texts[41] = texts[40]
    towers = Directions(circle([*images, *[0.0] * 10]), circle([*captions, *[0.0] * 10]))
    data = numbered(160, held_out=150, texts=texts)
    task = text_task(towers, data)
    result = task.evaluate()
    assert result == pytest.approx(dict.fromkeys(("retrieval", "clip_l", "clip_g", "t5"), 146 / 150))
    assert all(towers.masked), "captions are compared without their padding"
    assert not any(towers.modes)
    assert towers.training, "again"
    towers = Directions(circle([0.0, 90.0, 180.0, 270.0]), circle([0.0, 90.0, 180.0, 270.0]))
    towers.projections[2].weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))  # exchanges images 1 and 3
    result = text_task(towers, numbered(4, held_out=4)).evaluate()
    assert result == pytest.approx({"clip_l": 1.0, "clip_g": 1.0, "t5": 0.5, "retrieval": 2.5 / 3})
    towers = Directions(circle([0.0] * 5), circle([0.0] * 15))
    text_task(towers, numbered(5, held_out=5, captions=3)).evaluate()
    assert towers.captions[0] == [0, 3 + 1, 6 + 2, 9 + 0, 12 + 1]


@torch.no_grad()
def test_t5_is_pooled_over_its_real_tokens(tokenizers: Tokenizers) -> None:
    towers = Towers(SIZE, tokenizers, 32, 0).eval()
    ids, lengths = torch.randint(3, 60, (3, 16), generator=torch.Generator().manual_seed(0)), torch.tensor([16, 5, 1])
    for masked in (True, False):
        tokens, _ = encode(towers.text[2], ids, lengths if masked else None)
        vectors = towers.text_vector(2, ids, lengths, masked)
        for row, length in enumerate(lengths.tolist()):
            pooled = towers.t5_pooling(tokens[row, :length].mean(0))
            assert torch.allclose(vectors[row], pooled / pooled.norm(), atol=1e-5)
    padded = ids.clone()
    padded[1, 5:] = 7
    same = []
    for masked in (True, False):
        vectors = [towers.text_vector(2, tokens, lengths, masked)[1] for tokens in (ids, padded)]
        same.append(torch.allclose(*vectors))
    assert same == [True, False], "only without a mask does padding count"
    for index in (0, 1):
        _, pooled = encode(towers.text[index], ids)
        expected = pooled / pooled.norm(dim=1, keepdim=True)
        assert torch.allclose(towers.text_vector(index, ids, lengths, True), expected, atol=1e-6)


def test_temperatures_are_007_to_100(task: TextTask, tokenizers: Tokenizers) -> None:
    assert task.judge().logit_scale.item() == pytest.approx(task.towers.scales[1].item())
    scales = task.towers.scales.data
    before = scales.clone()
    try:
        scales[1] = 9.0
        assert task.judge().logit_scale.item() == pytest.approx(math.log(100))
    finally:
        scales.copy_(before)
    assert Towers(SIZE, tokenizers, 32, 0).scales.exp().tolist() == pytest.approx([1 / 0.07] * 3)


def test_encoders_are_copies_for_use(task: TextTask) -> None:
    task.towers.train()
    for model, trained in zip(task.encoders(), task.towers.text, strict=True):
        assert (trained.training, model.training) == (True, False)
        pairs = list(zip(model.parameters(), trained.parameters(), strict=True))
        assert all(torch.equal(copied, weight) for copied, weight in pairs)
        assert not any(copied is weight for copied, weight in pairs)


def pool_of(ids: Sequence[int], held_out: int, height: int, width: int, captions: Sequence[Sequence[str]]) -> Pool:
    pixels = torch.tensor(ids, dtype=torch.uint8)[:, None, None, None].expand(len(ids), height, width, 3)
    return Pool(pixels, tuple(ids), tuple(map(tuple, captions)), held_out, "")


def test_pools_are_joined_by_sample(tokenizers: Tokenizers) -> None:
    """Samples 2 and 3 are in both pools: the first counts, and so does what it holds out."""
    first = pool_of([1, 2, 3, 4], 2, 70, 100, [["one", "uno"], ["two"], ["three"], []])
    second = pool_of([5, 3, 2, 6, 7], 3, 96, 96, [["five"], ["3"], ["2"], ["six", "seis", "sechs"], ["seven"]])
    images = captioned_images([first, second], tokenizers, CPU)
    assert images.pixels.shape == (7, 64, 64, 3), "the largest multiple of 32 within all sizes"
    assert images.pixels[:, 0, 0, 0].tolist() == [1, 2, 5, 3, 4, 6, 7], "held-out ones first"
    assert images.held_out == 3
    texts = [images.texts[start:stop] for start, stop in itertools.pairwise(images.first.tolist())]
    expected = [("one", "uno"), ("two",), ("five",), ("three",), ("",), ("six", "seis", "sechs"), ("seven",)]
    assert texts == expected
    for ids, tokenizer in zip(images.ids, tokenizers.values(), strict=True):
        assert ids.shape == (len(images.texts), tokenizer.model_max_length)
        assert tokenizer.decode(ids[2], skip_special_tokens=True).strip("! ") == "two"
    t5 = tokenizers["tokenizer_3"]
    assert images.lengths.tolist() == [len(t5(text).input_ids) for text in images.texts]


@pytest.mark.parametrize(("sides", "side"), [((20, 200), 32), ((100, 90), 64), ((300, 200), 128)])
def test_image_towers_see_multiples_of_32_up_to_128(tokenizers: Tokenizers, sides: tuple[int, int], side: int) -> None:
    images = captioned_images([pool_of([1, 2], 0, *sides, [["a"], ["b"]])], tokenizers, CPU)
    assert images.pixels.shape == (2, side, side, 3)


def test_augmentation_scales_and_shifts_within_limits() -> None:
    """The colours of a ramp from -1 to 1 are coordinates: scale and shift of each image follow from two of them."""
    ramp = (torch.arange(64.0) + 0.5) / 32 - 1
    images = torch.stack([ramp.expand(64, 64), ramp[:, None].expand(64, 64), torch.zeros(64, 64)])
    changed = augment(images.expand(200, 3, 64, 64), np.random.default_rng(0))
    x, y = changed[:, 0], changed[:, 1]
    distance = ramp[40] - ramp[23]
    zoom = (x[:, 32, 40] - x[:, 32, 23]) / distance
    assert torch.allclose(zoom, (y[:, 40, 32] - y[:, 23, 32]) / distance, atol=1e-4), "the same along both axes"
    assert (zoom.min().item(), zoom.max().item()) == pytest.approx((0.85, 1.15), abs=0.01)
    for coordinates in (x, y):
        shift = coordinates[:, 31:33, 31:33].mean((1, 2))
        assert (shift.min().item(), shift.max().item()) == pytest.approx((-0.1, 0.1), abs=0.01)
    assert not torch.allclose(x[:, 31:33, 31:33].mean((1, 2)), y[:, 31:33, 31:33].mean((1, 2)), atol=0.01)
    assert changed[:, 2].abs().max() == 0
    assert changed.is_contiguous(memory_format=torch.channels_last)
