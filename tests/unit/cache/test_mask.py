"""Masks by tiny random segmentation models: texts and classes, resuming, and what is refused."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from sd3_light.assets import DEMO
from sd3_light.cache import mask
from sd3_light.cache.images_beside import REJECTS
from sd3_light.cache.mask import MaskOptions
from sd3_light.cli import app
from sd3_light.config.load_dataset import load_directories
from sd3_light.sources.records import FileBytes, Record
from sd3_light.sources.scan import scan
from tests.refusals import refused

NAMES = ["0", "1", "2", "3", "more/4", "more/5"]
SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = MaskOptions(("a dog",), batch=4)


def save(folder: Path, model_class: Any, config: Any, processor: Any) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_class(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIPSeg of a few thousand random weights."""
    tokenizer = transformers.CLIPTokenizer.from_pretrained(DEMO / "tokenizer")
    text = {**SHAPE, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    vision = {**SHAPE, "image_size": 16, "patch_size": 4}
    sizes = {"projection_dim": 16, "extract_layers": [0, 1], "reduce_dim": 8, "decoder_num_attention_heads": 2}
    sizes |= {"decoder_intermediate_size": 16, "conditional_layer": 0}
    config = transformers.CLIPSegConfig(text_config=text, vision_config=vision, **sizes)
    images = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    processor = transformers.CLIPSegProcessor(images, tokenizer)
    folder = tmp_path_factory.mktemp("clipseg") / "model"
    return save(folder, transformers.CLIPSegForImageSegmentation, config, processor)


@pytest.fixture(scope="module")
def save_classes(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a SegFormer with these classes."""

    def write(*classes: str) -> Path:
        sizes = {"hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 8, "depths": [1] * 4}
        names = {"num_labels": len(classes), "id2label": dict(enumerate(classes))}
        config = transformers.SegformerConfig(**sizes, **names)
        processor = transformers.SegformerImageProcessor(size={"height": 32, "width": 32})
        folder = tmp_path_factory.mktemp("segformer") / "model"
        return save(folder, transformers.SegformerForSemanticSegmentation, config, processor)

    return write


@pytest.fixture
def data(tmp_path: Path) -> Path:
    images = tmp_path / "images"
    (images / "more").mkdir(parents=True)
    for number, name in enumerate(NAMES):
        noise = np.random.default_rng(number).integers(0, 256, (18, 20 + number, 3), dtype=np.uint8)
        Image.fromarray(noise).save(images / f"{name}.png")
        (images / f"{name}.txt").write_text("a caption")
    (images / "broken.png").write_text("not an image")
    (images / "broken.txt").write_text("a caption")
    (tmp_path / "data.toml").write_text('resolutions = [64]\n[[directory]]\npath = "images"\nmask_path = "masks"\n')
    return tmp_path / "data.toml"


def masks_of(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    paths = sorted(folder.rglob("*.png"))
    return {path.relative_to(folder).with_suffix("").as_posix(): np.asarray(Image.open(path)) for path in paths}


def rejects_of(folder: Path) -> dict[str, str]:
    lines = (folder / REJECTS).read_text().splitlines()
    return {entry["file"]: entry["reason"].split(":")[0] for entry in map(json.loads, lines)}


def middle(text_model: Path, data: Path, prompts: Sequence[str] = TEXT.prompts) -> float:
    """A threshold that about half of the pixels reach."""
    segmenter = mask.Segmenter.load(str(text_model), replace(TEXT, prompts=tuple(prompts)))
    image = Image.open(data.parent / "images" / "0.png").convert("RGB")
    finder: Any = segmenter._find
    with torch.no_grad():
        return float(finder._logits([image, image], prompts[0])[0].sigmoid().median())


def test_every_image_gets_a_mask_that_the_dataset_finds(text_model: Path, data: Path) -> None:
    options = replace(TEXT, threshold=middle(text_model, data))
    (report,) = mask.run(data, str(text_model), options)
    written = report.written
    assert (written.folder, written.written, written.kept, report.is_named) == (data.parent / "masks", 6, 0, True)
    assert rejects_of(report.written.folder) == {"broken.png": "not_an_image"}
    masks = masks_of(report.written.folder)
    assert sorted(masks) == sorted(NAMES)
    for number, name in enumerate(NAMES):
        assert masks[name].shape == (18, 20 + number)
        assert set(np.unique(masks[name])) == {0, 255}
    (directory,), _ = load_directories(data)
    records = [item for item in scan(directory, 0) if isinstance(item, Record)]
    assert len(records) == 7
    stored = {item.key.partition("/")[2]: item.mask for item in records}
    assert isinstance(stored["more/4.png"], FileBytes)
    assert Path(stored["more/4.png"].path) == data.parent / "masks/more/4.png"
    assert stored["broken.png"] is None


def test_masks_are_those_of_the_model(text_model: Path, data: Path) -> None:
    """One image, by the model's own call, with two prompts."""
    prompts, threshold = ("a dog", "a cat"), middle(text_model, data)
    mask.run(data, str(text_model), replace(TEXT, prompts=prompts, threshold=threshold, batch=3))
    processor = transformers.CLIPSegProcessor.from_pretrained(text_model)
    model = transformers.CLIPSegForImageSegmentation.from_pretrained(text_model).eval()
    image = Image.open(data.parent / "images" / "3.png").convert("RGB")
    with torch.no_grad():
        inputs = processor(text=list(prompts), images=[image] * 2, padding=True, return_tensors="pt")
        likely = model(**inputs).logits.sigmoid()
    resized = [Image.fromarray(plane.numpy()).resize(image.size, Image.Resampling.BILINEAR) for plane in likely]
    planes = list(map(np.asarray, resized))
    found = masks_of(data.parent / "masks")["3"] == 255
    assert np.mean(found == (np.maximum(*planes) >= threshold)) > 0.97  # Pillow's kernel differs at the edges
    assert np.mean(found) not in (0, 1)


def test_masks_that_exist_are_kept(text_model: Path, data: Path) -> None:
    options = replace(TEXT, threshold=middle(text_model, data))
    mask.run(data, str(text_model), options)
    whole = masks_of(data.parent / "masks")
    (data.parent / "masks" / "1.png").unlink()
    (data.parent / "masks" / "more" / "5.png").unlink()
    drawn = Image.new("L", (20, 18), 7)
    drawn.save(data.parent / "masks" / "0.png")
    drawn.save(data.parent / "masks" / "2.webp")
    (data.parent / "masks" / "2.png").unlink()
    (report,) = mask.run(data, str(text_model), replace(options, batch=1))
    assert (report.written.written, report.written.kept) == (2, 4)
    masks = masks_of(data.parent / "masks")
    assert (masks["0"] == 7).all()
    assert "2" not in masks
    assert all(np.array_equal(masks[name], whole[name]) for name in NAMES if name not in ("0", "2"))
    (report,) = mask.run(data, str(text_model), options, overwrite=True)
    assert (report.written.written, report.written.kept) == (6, 0)
    assert np.array_equal(masks_of(data.parent / "masks")["0"], whole["0"])


def test_an_inverted_mask_is_the_rest(text_model: Path, data: Path) -> None:
    options = replace(TEXT, threshold=middle(text_model, data))
    mask.run(data, str(text_model), options, data.parent / "found")
    mask.run(data, str(text_model), replace(options, invert=True), data.parent / "rest")
    assert not (data.parent / "masks").exists()
    found, rest = masks_of(data.parent / "found"), masks_of(data.parent / "rest")
    assert all(np.array_equal(found[name], 255 - rest[name]) for name in NAMES)


def test_an_image_without_the_object_gets_no_mask_and_a_folder_needs_no_toml(text_model: Path, data: Path) -> None:
    (report,) = mask.run(data, str(text_model), replace(TEXT, threshold=1.0))
    assert report.written.written == 0
    assert set(rejects_of(report.written.folder).values()) == {"empty_mask", "not_an_image"}
    (report,) = mask.run(data, str(text_model), replace(TEXT, threshold=0.0))
    assert (report.written.written, rejects_of(report.written.folder)) == (6, {"broken.png": "not_an_image"})
    (report,) = mask.run(data, str(text_model), replace(TEXT, threshold=1.0), overwrite=True)
    assert (report.written.written, masks_of(report.written.folder)) == (0, {})
    (report,) = mask.run(data.parent / "images", str(text_model), replace(TEXT, threshold=0.0))
    assert (report.written.folder, report.is_named) == (data.parent / "images-masks", False)
    assert len(masks_of(report.written.folder)) == 6


def test_classes_are_found_by_name_and_all_but_the_background_without_one(save_classes: Any, data: Path) -> None:
    model = save_classes("Background", "dog, puppy", "cat")
    folder = data.parent
    mask.run(data, str(model), MaskOptions(), folder / "all")
    for name in ("puppy", "Cat"):
        mask.run(data, str(model), MaskOptions((name,)), folder / name)
    mask.run(data, str(model), MaskOptions(("dog", "cat"), batch=1), folder / "both")
    processor = transformers.SegformerImageProcessor.from_pretrained(model)
    segmenter = transformers.SegformerForSemanticSegmentation.from_pretrained(model).eval()
    found = {kind: masks_of(folder / kind) for kind in ("all", "both", "puppy", "Cat")}
    present = set()
    for name in NAMES:
        image = Image.open(folder / "images" / f"{name}.png").convert("RGB")
        with torch.no_grad():
            outputs = segmenter(**processor(images=image, return_tensors="pt"))
        (classes,) = processor.post_process_semantic_segmentation(outputs, target_sizes=[image.size[::-1]])
        present |= set(classes.unique().tolist())
        for kind, chosen in (("all", (1, 2)), ("both", (1, 2)), ("puppy", (1,)), ("Cat", (2,))):
            expected = np.isin(classes.numpy(), chosen)
            shown = found[kind].get(name, np.zeros(1))
            assert np.array_equal(shown == 255, expected) if expected.any() else name not in found[kind]
    assert len(present) > 1


def test_what_cannot_be_used_is_named(text_model: Path, save_classes: Any, data: Path, tmp_path: Path) -> None:
    sky = save_classes("sky", "wall")
    other = tmp_path / "oneformer"
    transformers.OneFormerConfig().save_pretrained(other)
    save_file({}, other / "model.safetensors")
    for model, options, message in (
        (sky, MaskOptions(), "it has no class `background`; pass --prompt with classes such as sky, wall"),
        (sky, MaskOptions(("sy",)), "no such class; it has sky"),
        (text_model, MaskOptions(), 'pass --prompt "a dog"'),
        (tmp_path / "none", TEXT, "none"),
        (other, MaskOptions(), "a oneformer; use a CLIPSeg, or a model with classes"),
        (DEMO / "text_encoder", TEXT, "not a usable segmentation model: a clip_text_model; use a CLIPSeg"),
    ):
        refused(message.replace("(", r"\("), mask.run, data, str(model), options)
    text = data.read_text()
    (tmp_path / "others").mkdir()
    Image.new("RGB", (20, 18)).save(tmp_path / "others" / "0.png")
    data.write_text(text + '[[directory]]\npath = "others"\n')
    refused(r"--out: .* has 2 folders of images", mask.run, data, str(text_model), TEXT, tmp_path / "out")
    data.write_text(text.replace('mask_path = "masks"', 'mask_path = "s3://bucket/masks"'))
    refused("masks are written to a folder on disk", mask.run, data, str(text_model), TEXT)


def test_the_command_names_empty_and_full_masks(text_model: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planes = {20: 0.0, 21: 1.0, 22: 0.25}

    def found(self: Any, images: Sequence[Image.Image], prompt: str) -> list[torch.Tensor]:
        result = []
        for image in images:
            plane = torch.zeros(image.height, image.width, dtype=torch.bool)
            plane.view(-1)[: round(planes.get(image.width, 0.5) * plane.numel())] = True
            result.append(plane)
        return result

    monkeypatch.setattr(mask._TextFinder, "_found", found)
    page = data.parent / "page.html"
    arguments = ["mask", str(data), "--model", str(text_model), "--prompt", "a dog", "--page", str(page)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if "mask" in line or "covered" in line or "found" in line]
    covers = (1 + 0.25 + 3 * 0.5) / 5
    assert f"wrote 5 masks, kept 0; new ones cover {covers:.0%} of their images" in result.output, lines
    assert "nothing found in 1 image: 0.png" in lines
    assert "everything covered in 1 image: 1.png" in lines
    assert any(line.startswith("2 images without a mask: see ") for line in lines)
    shown = page.read_text()
    assert shown.count("<article") == 5
    assert "tinted: excluded from training" in shown
