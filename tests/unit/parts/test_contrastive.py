"""Text encoders trained against the image tower, and the judge that remains."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, PreTrainedTokenizerBase

from sd3_light.config.faults import UserError
from sd3_light.encoders.judge import load_judge, save_judge
from sd3_light.parts.contrastive import CaptionedImages, TextOptions, TextTask, Towers, augment, captioned_images
from sd3_light.parts.fit import Fit, FitOptions
from sd3_light.parts.images import Pool
from sd3_light.parts.sizes import TextSize
from sd3_light.parts.text_encoders import encode, scale_outputs
from sd3_light.parts.tokenizers import learn_tokenizers

CPU = torch.device("cpu")
SIZE = TextSize(32, 32, 64, 2, (8, 16, 32, 64), (1, 1, 1, 1))

Trained = tuple[TextTask, Fit]


@pytest.fixture(scope="module")
def tokenizers(pools: list[Pool]) -> dict[str, PreTrainedTokenizerBase]:
    return learn_tokenizers(sorted({text for texts in pools[0].captions for text in texts}), 2000)


@pytest.fixture(scope="module")
def images(pools: list[Pool], tokenizers: dict[str, PreTrainedTokenizerBase]) -> CaptionedImages:
    return captioned_images(pools, tokenizers, CPU)


@pytest.fixture(scope="module")
def trained(
    images: CaptionedImages,
    tokenizers: dict[str, PreTrainedTokenizerBase],
    tmp_path_factory: pytest.TempPathFactory,
) -> Trained:
    task = TextTask(Towers(SIZE, tokenizers, 32, 0), images, CPU, TextOptions(batch=24))
    run = Fit("text", task, FitOptions(steps=60, lr=3e-3, evaluate_every=60), tmp_path_factory.mktemp("text"), {})
    before = torch.stack([task.loss(step)[0].detach() for step in (0, 1)]).mean()
    run.run(lambda: None)
    run.progress.history.insert(0, {"loss": before.item()})
    run.use_averages()
    return task, run


def test_captions_follow_their_images(images: CaptionedImages, pools: list[Pool]) -> None:
    (pool,) = pools
    assert images.held_out == pool.held_out
    assert torch.equal(images.pixels, pool.pixels)  # already squares of that size
    for row in (0, 5, 63):
        assert images.texts[images.first[row] : images.first[row + 1]] == pool.captions[row]
    assert images.lengths.min() > 1


def test_the_loss_falls_below_chance(trained: Trained) -> None:
    task, run = trained
    start = run.progress.history[0]["loss"]
    end = torch.stack([task.loss(step)[0].detach() for step in (60, 61)]).mean()
    assert end < 0.75 * start
    assert end < 0.9 * np.log(24)  # that of guessing


def test_retrieval_on_training_images_beats_chance(trained: Trained) -> None:
    task = trained[0]
    everything = TextTask(task.towers, _held_out(task.data, 48), CPU, task.options)
    result = everything.evaluate()
    assert set(result) == {"retrieval", "clip_l", "clip_g", "t5"}
    assert result["retrieval"] > 3 / 48


def _held_out(images: CaptionedImages, count: int) -> CaptionedImages:
    return CaptionedImages(images.pixels, images.texts, images.first, images.ids, images.lengths, count)


def test_equal_captions_are_not_wrong_answers(trained: Trained) -> None:
    task = trained[0]
    same = torch.zeros(6, dtype=torch.long)
    loss = task._loss(0, torch.randn(6, 64), same, masked=True)
    assert loss.item() == pytest.approx(0.0, abs=1e-6)


def test_the_judge_agrees_with_the_towers(
    trained: Trained, tokenizers: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    task = trained[0]
    save_judge(task.judge(), tokenizers["tokenizer_2"], 32, tmp_path)
    judge = load_judge(tmp_path, CPU)
    texts = list(task.data.texts[:6])
    expected = task.towers.text_vector(1, task.data.ids[1][:6], task.data.lengths[:6], masked=True)
    assert torch.allclose(judge.text_features(texts), expected, atol=1e-5)
    task.towers.eval()
    features = task.towers.projections[1](task._image_features())
    images = task.data.pixels[: task.data.held_out]
    assert torch.allclose(judge.image_features(images), torch.nn.functional.normalize(features, dim=-1), atol=1e-5)
    assert judge.image_features(np.zeros((2, 40, 48, 3), np.uint8)).shape == (2, 32)
    assert type(AutoModel.from_pretrained(tmp_path)).__name__ == "VisionTextDualEncoderModel"


def test_folders_that_are_not_judges_are_refused(
    trained: Trained, tokenizers: dict[str, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="has no judge and no preprocessor_config"):
        load_judge(tmp_path, CPU)
    save_judge(trained[0].judge(), tokenizers["tokenizer_2"], 32, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(UserError, match="no size, image_mean and image_std"):
        load_judge(tmp_path, CPU)


def test_outputs_have_unit_scale(trained: Trained) -> None:
    for model, ids in zip(trained[0].encoders(), trained[0].data.ids, strict=True):
        scale_outputs(model, *encode(model, ids))
        tokens, pooled = encode(model, ids)
        assert tokens.square().mean().sqrt().item() == pytest.approx(1, abs=0.02)
        if pooled is not None:
            assert pooled.square().mean().sqrt().item() == pytest.approx(1, abs=0.02)


def test_augmentation_is_a_small_change() -> None:
    images = torch.rand(4, 3, 32, 32)
    changed = augment(images, np.random.default_rng(0))
    assert changed.shape == images.shape
    assert not torch.equal(changed, images)
    assert changed.is_contiguous(memory_format=torch.channels_last)
