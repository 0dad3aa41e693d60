"""Control images: edges, depth by tiny random models, resuming, odd inputs, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

from sd3_light.assets import DEMO
from sd3_light.cache import control
from sd3_light.cache.control import ControlOptions
from sd3_light.cache.edges import draw_edges
from sd3_light.cache.images_beside import REJECTS
from sd3_light.cli import app
from sd3_light.config.load_dataset import load_directories
from sd3_light.sources.records import Record
from sd3_light.sources.scan import scan
from tests.refusals import refused

EDGES = ControlOptions("edges")


def scene(size: tuple[int, int] = (40, 30)) -> Image.Image:
    image = Image.new("RGB", size, (20, 40, 60))
    image.paste((240, 200, 30), (size[0] // 4, size[1] // 3, size[0], size[1]))
    return image


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    for number, name in enumerate(("0", "1", "more/2")):
        scene((40 + 8 * number, 30)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text("a caption")
    return folder


def drawn(folder: Path) -> dict[str, np.ndarray]:
    return {str(path.relative_to(folder)): np.asarray(Image.open(path)) for path in sorted(folder.rglob("*.png"))}


def save_depth_model(folder: Path, **keys: Any) -> Path:
    backbone = {"image_size": 28, "patch_size": 14, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    backbone |= {"out_indices": [1, 2], "apply_layernorm": True, "reshape_hidden_states": False}
    keys |= {"patch_size": 14, "reassemble_hidden_size": 16, "reassemble_factors": [2, 1], "neck_hidden_sizes": [8, 8]}
    keys |= {"fusion_hidden_size": 8, "head_hidden_size": 8}
    config = transformers.DepthAnythingConfig(backbone_config=transformers.Dinov2Config(**backbone), **keys)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.DepthAnythingForDepthEstimation(config).save_pretrained(folder)
    transformers.DPTImageProcessor(size={"height": 28, "width": 28}).save_pretrained(folder)
    return folder


def test_every_image_gets_its_edges_and_the_dataset_finds_them(images: Path) -> None:
    (result,) = control.run(images, EDGES)
    folder = images.with_name("images-edges")
    assert (result.written.folder, result.written.written, result.is_named) == (folder, 3, False)
    shown = drawn(folder)
    assert sorted(shown) == ["0.png", "1.png", "more/2.png"]
    for name, edges in shown.items():
        assert np.array_equal(edges, np.asarray(draw_edges(Image.open(images / name), 0.2)))
        assert edges.any()
    toml = images.with_name("data.toml")
    toml.write_text('resolutions = [64]\n[[directory]]\npath = "images"\nreferences = ["images-edges"]\n')
    missing = images.with_name("missing.toml")
    missing.write_text(toml.read_text().replace('"images-edges"', '"images-depth", "images-edges"'))
    (result,) = control.run(missing, EDGES)
    assert (result.written.kept, result.is_named) == (3, True), "another folder need not exist yet"
    (directory,), _ = load_directories(toml)
    records = [item for item in scan(directory, 0) if isinstance(item, Record)]
    assert [len(record.references) for record in records] == [1, 1, 1]
    (result,) = control.run(toml, EDGES)
    assert (result.written.written, result.written.kept, result.is_named) == (0, 3, True)
    (result,) = control.run(toml, EDGES, overwrite=True)
    assert (result.written.written, result.written.kept) == (3, 0)


def test_a_folder_below_the_images_is_not_read_as_images(images: Path) -> None:
    for _ in range(2):
        (result,) = control.run(images, EDGES, out=images / "edges")
    assert (result.written.written, result.written.kept) == (0, 3)
    assert sorted(drawn(images / "edges")) == ["0.png", "1.png", "more/2.png"]
    refused("is the folder of the images; name another one", control.run, images, EDGES, out=images)


def test_large_images_are_scaled_down(images: Path) -> None:
    scene((400, 100)).save(images / "1.png")
    control.run(images, replace(EDGES, resolution=100))
    shapes = {name: edges.shape for name, edges in drawn(images.with_name("images-edges")).items()}
    assert shapes == {"0.png": (30, 40), "1.png": (50, 200), "more/2.png": (30, 56)}


def test_odd_images_have_the_edges_of_what_is_trained_on(images: Path, tmp_path: Path) -> None:
    """Upright, over white, at 8 bits; links are followed, and what cannot be read is listed."""
    plain = scene()
    expected = np.asarray(draw_edges(plain, 0.2))
    rotated = plain.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated.save(images / "exif.png", exif=exif)
    plain.quantize(4).save(images / "palette.png")
    sixteen = np.asarray(plain.convert("L")).astype(np.uint16) * 257
    Image.fromarray(sixteen).save(images / "sixteen.png")
    hidden = plain.convert("RGBA")
    hidden.putalpha(0)
    hidden.save(images / "transparent.png")
    plain.save(tmp_path / "elsewhere.png")
    (images / "link.png").symlink_to(tmp_path / "elsewhere.png")
    odd = ("a b.png", "-o.png", "x\ny.png", "名.png", "a.b.png", "$(touch z).png", "<b>.png")
    for name in odd:
        plain.save(images / name)
    (images / "broken.png").write_bytes(b"not an image")
    (images / "dangling.png").symlink_to(tmp_path / "nothing.png")
    (result,) = control.run(images, EDGES, page=tmp_path / "page.html")
    folder = images.with_name("images-edges")
    shown = drawn(folder)
    for name in ("exif.png", "palette.png", "link.png", *odd):
        assert np.array_equal(shown[name], expected), name
    assert np.array_equal(shown["sixteen.png"], np.asarray(draw_edges(plain.convert("L").convert("RGB"), 0.2)))
    assert not shown["transparent.png"].any()
    assert not (folder / "link.png").is_symlink()
    lines = (folder / REJECTS).read_text().splitlines()
    rejects = {entry["file"]: entry["reason"].split(":")[0] for entry in map(json.loads, lines)}
    assert result.written.rejects.keys() == rejects.keys()
    assert rejects == {"broken.png": "not_an_image", "dangling.png": "unreadable"}
    page = (tmp_path / "page.html").read_text()
    assert "&lt;b&gt;.png" in page
    assert page.count("<article") == len(shown)


@pytest.mark.parametrize(("kind", "sign"), [("relative", 1), ("metric", -1)])
def test_near_is_white(images: Path, tmp_path: Path, kind: str, sign: int) -> None:
    keys = {"depth_estimation_type": kind, "max_depth": 20} if kind == "metric" else {}
    model = save_depth_model(tmp_path / "depth", **keys)
    (result,) = control.run(images, ControlOptions("depth", str(model), batch=1))
    folder = images.with_name("images-depth")
    assert (result.written.folder, result.written.written) == (folder, 3)
    processor = transformers.DPTImageProcessor.from_pretrained(model)
    network = transformers.DepthAnythingForDepthEstimation.from_pretrained(model).eval()
    for name, shades in drawn(folder).items():
        image = Image.open(images / name)
        with torch.no_grad():
            outputs = network(**processor(images=image, return_tensors="pt"))
        (depth,) = processor.post_process_depth_estimation(outputs, target_sizes=[image.size[::-1]])
        values = depth["predicted_depth"].numpy()
        assert shades.shape == values.shape
        assert (shades.min(), shades.max()) == (0, 255)
        nearest = values.argmax() if sign > 0 else values.argmin()
        assert shades.ravel()[nearest] == 255
        order = np.corrcoef(values.ravel().argsort().argsort(), shades.ravel().astype(float))[0, 1]
        assert sign * order > 0.5


def test_an_image_of_infinite_depth_is_listed(images: Path, tmp_path: Path) -> None:
    model = save_depth_model(tmp_path / "depth")
    weights = transformers.DepthAnythingForDepthEstimation.from_pretrained(model)
    with torch.no_grad():
        weights.head.conv3.bias.fill_(float("inf"))
    weights.save_pretrained(model)
    (result,) = control.run(images, ControlOptions("depth", str(model)))
    assert result.written.written == 0
    assert {reason.split(":")[0] for reason in result.written.rejects.values()} == {"not_finite"}


def test_the_command_says_what_to_write_in_the_dataset(images: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["control", str(images), "edges", "--page", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    assert "images-edges: wrote 3 control images, kept 0" in result.output
    assert 'write references = ["' in result.output
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ControlOptions("depth"), "--model is missing: depth needs a depth-estimation model"),
        (ControlOptions("edges", "model"), "--model: edges are drawn without a model; remove it"),
        (ControlOptions("pose"), "pose: poses take a detector of people"),
        (ControlOptions("scribble"), "scribble: unknown kind of control image; the kinds are edges, depth"),
        (ControlOptions("depth", str(DEMO / "text_encoder")), "not a usable depth-estimation model: a clip_text_model"),
        (ControlOptions("depth", "/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(images: Path, options: ControlOptions, message: str) -> None:
    refused(message, control.run, images, options)
