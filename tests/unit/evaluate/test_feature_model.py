"""Folders whose features compare images: CLIP and vision models, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel

from sd3_light.config.faults import UserError
from sd3_light.evaluate.feature_model import PREPROCESSOR, load_feature_model
from tests.judge_folders import write_clip, write_vision

CPU = torch.device("cpu")
PIXELS = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)


def test_a_clip_folder_compares_images_and_texts(tmp_path: Path) -> None:
    judge = load_feature_model(write_clip(tmp_path), CPU)
    assert judge.reads_text
    images, texts = judge.image_features(PIXELS), judge.text_features(["a red circle", "一个圆"])
    assert images.shape == (3, 12)
    assert texts.shape == (2, 12)
    assert torch.allclose(texts.norm(dim=1), torch.ones(2))
    write_clip(tmp_path / "parts" / "judge")
    assert load_feature_model(tmp_path / "parts", CPU).reads_text, "as the parts stage writes it"


def test_a_vision_folder_gives_its_pooled_output(tmp_path: Path) -> None:
    judge = load_feature_model(write_vision(tmp_path), CPU)
    assert not judge.reads_text
    pixels = torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        expected = AutoModel.from_pretrained(tmp_path)(pixel_values=pixels).pooler_output
    assert torch.allclose(judge.image_features(PIXELS), torch.nn.functional.normalize(expected, dim=1), atol=1e-5)


def test_the_side_is_that_of_the_crop(tmp_path: Path) -> None:
    settings = json.loads((write_vision(tmp_path) / PREPROCESSOR).read_text())
    settings |= {"size": {"shortest_edge": 40}, "crop_size": {"height": 24, "width": 24}, "do_center_crop": True}
    (tmp_path / PREPROCESSOR).write_text(json.dumps(settings))
    assert load_feature_model(tmp_path, CPU).side == 24
    (tmp_path / PREPROCESSOR).write_text(json.dumps({**settings, "do_center_crop": False}))
    assert load_feature_model(tmp_path, CPU).side == 40


def test_folders_without_usable_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no judge and no preprocessor_config.json; give a folder of `sd3-light"):
        load_feature_model(tmp_path, CPU)
    write_vision(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"cannot be loaded: .*safetensors") as raised:
        load_feature_model(tmp_path, CPU)
    assert "\n" not in str(raised.value)


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    write_vision(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_feature_model(tmp_path, CPU)
    assert not (tmp_path / "ran").exists()


def test_a_text_model_is_refused(tmp_path: Path) -> None:
    settings = (write_vision(tmp_path / "vision") / PREPROCESSOR).read_text()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=10, **sizes)).save_pretrained(tmp_path / "text")
    (tmp_path / "text" / PREPROCESSOR).write_text(settings)
    with pytest.raises(UserError, match="is a BertModel, without features of images"):
        load_feature_model(tmp_path / "text", CPU)
