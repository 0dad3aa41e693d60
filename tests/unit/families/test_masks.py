"""Masks of every stock family: from a folder to the cache, and from the cache to the loss and the weights."""

import copy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sd3_light.cache.identity import stored_columns
from sd3_light.check import verb as check
from sd3_light.core.batch import Batch
from sd3_light.core.columns import Bucket, mask_factor
from sd3_light.core.registry import family_named, family_of
from sd3_light.data.manifest import SHARDS, Manifest
from sd3_light.data.reader import ShardReader
from sd3_light.data.shards import read_origins
from sd3_light.flow.objective import inside_and_outside
from sd3_light.sources.preprocess import decode_mask
from tests.families import TinyFolder, deep_compression_vae
from tests.made_up_cache import LABEL, write_cache
from tests.project import Project
from tests.stock_project import BUCKETS, LORA, write_project
from tests.unit.families import test_stock_cache as caches
from tests.unit.families.test_stock_families import SEED, Tiny
from tests.unit.families.test_stock_training import require_exact_resume, run

pytestmark = pytest.mark.usefixtures("unproven")

FAMILIES = ["flux", "flux2", "krea2", "prx", "qwen_image", "sana", "wan", "z_image"]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tiny_folder: TinyFolder) -> Tiny:
    return Tiny(request.param, tiny_folder(request.param))


def batch_of(tiny: Tiny, folder: Path, masked: bool) -> Batch:
    bucket = Bucket(96, 64, 5 if tiny.name == "wan" else 1)
    write_cache(folder, tiny.family, tiny.config.model, {bucket: 4}, masked=masked)
    data = tiny.opened(folder)
    rows = data.read(data.order(SEED, {LABEL: 1.0}, lambda resolution: 4).picks(0), SEED)
    preparer = tiny.family.training.preparer(tiny.config, tiny.start, data.empty_text())
    return preparer.prepare_inputs(rows, 0.3)


def test_the_loss_is_averaged_over_the_mask(tiny: Tiny, tmp_path: Path) -> None:
    plain = batch_of(tiny, tmp_path / "plain", masked=False)
    masked = batch_of(tiny, tmp_path / "masked", masked=True)
    assert plain.get("mask") is None
    mask = masked["mask"]
    mask[:, :3, :5] = 0
    others = masked["target"].clone()
    others[..., :3, :5] += 100
    assert mask.shape == (4, 8, 12)
    model = tiny.family.training.model(tiny.family.weights.load(tiny.start, SEED), tiny.config, fast=False)
    with torch.no_grad():
        velocity = model.predict(masked).velocity
        losses = model(masked)
        ones = model(plain.with_values({"mask": torch.ones_like(mask)}))
        without = model(plain)
        hidden = model(masked.with_values({"target": others}))
    expected = []
    for prediction, target, weights in zip(velocity.double(), masked["target"].double(), mask.double(), strict=True):
        error = (prediction - target).square().flatten(0, -3)  # of each channel, and frame
        expected.append(sum(float((plane * weights).sum()) for plane in error) / (len(error) * float(weights.sum())))
    assert losses["each"].tolist() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(ones["each"], without["each"])
    assert torch.equal(hidden["each"], losses["each"]), "the loss depends on what the mask excludes"


def outside(tiny: Tiny, weight: float) -> Tiny:
    changed = copy.copy(tiny)
    model = tiny.config.model.model_copy(update={"outside_mask_weight": weight})
    changed.config = tiny.config.model_copy(update={"model": model})
    return changed


def test_what_is_outside_of_the_mask_counts_as_much_as_the_config_says(tiny: Tiny, tmp_path: Path) -> None:
    masked = batch_of(tiny, tmp_path / "masked", masked=True)
    weighted = batch_of(outside(tiny, 0.25), tmp_path / "weighted", masked=True)
    assert float(masked["mask"].min()) < 0.1 < 0.9 < float(masked["mask"].max())
    torch.testing.assert_close(weighted["mask"], 0.25 + 0.75 * masked["mask"])
    assert torch.equal(weighted["target"], masked["target"])


def test_white_areas_have_a_weight_of_exactly_one() -> None:
    for weight in torch.rand(1000, generator=torch.Generator().manual_seed(0)).tolist():
        weights = inside_and_outside(torch.tensor([0.0, 1.0]), weight)
        assert weights.tolist() == pytest.approx([weight, 1.0], rel=1e-6)
        assert weights[1] == 1


def write_masks(project: Project, first: int = 0) -> None:
    (project.folder / "masks").mkdir(exist_ok=True)
    for number in range(first, caches.COUNT, 2):
        shades = np.random.default_rng(number).integers(0, 256, (64, 64), dtype=np.uint8)
        Image.fromarray(shades).save(project.folder / "masks" / f"{number}.png")


def stored_masks(project: Project) -> dict[str, list[list[int]]]:
    """The masks by the names of images; white ones in a shard without masks."""
    manifest = Manifest.load(project.cache)
    masks = {}
    for entry in manifest.shards:
        reader = ShardReader(project.cache / SHARDS / entry.file, entry)
        white = torch.full(reader.value("moments", 0).shape[-2:], 255)
        for row, origin in enumerate(read_origins(reader.path.with_suffix(".arrow"))):
            masks[Path(origin.key).stem] = (white if reader.mask is None else reader.value("mask", row)).tolist()
    return masks


@pytest.fixture(params=["flux", "sana", "wan"])
def masked(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose even images have masks; Sana's VAE has 32 pixels per latent pixel, as the published one."""
    monkeypatch.setattr(type(family_named(request.param)), "packages", ())
    project = caches.write_project(tmp_path / "project", request.param, extra='mask_path = "masks"\n')
    if request.param == "sana":
        deep_compression_vae(levels=6).save_pretrained(project.model / "vae")
        project.data(project.data_toml.read_text().replace("resolutions", "side_step = 32\nresolutions"))
    write_masks(project)
    return project


def test_masks_have_the_size_of_the_latents_and_a_changed_one_encodes_nothing(masked: Project, tmp_path: Path) -> None:
    caches.build(masked)
    model = check.load(masked.train_toml).train.model
    factor = 32 if family_of(model).name == "sana" else 8
    assert mask_factor(stored_columns(model)) == factor
    stored = stored_masks(masked)
    for number in range(caches.COUNT):
        path = masked.folder / "masks" / f"{number}.png"
        side = 64 // factor
        expected = np.full((side, side), 255.0)
        if path.is_file():
            shades = np.asarray(decode_mask(path.read_bytes()), dtype=np.float64)
            expected = shades.reshape(side, factor, side, factor).mean((1, 3))
        np.testing.assert_allclose(stored[str(number)], expected, atol=1)
    before = stored_masks(masked)
    write_masks(masked, first=1)
    several = masked.copy(tmp_path / "several")
    report = caches.build(masked)
    assert caches.counted(report) == (0, 0)
    assert report.values.copied_images + report.reused == caches.COUNT
    after = stored_masks(masked)
    changed = {name for name, mask in after.items() if mask != before[name]}
    assert changed == {str(number) for number in range(1, caches.COUNT, 2)}
    caches.in_two_processes(several)
    assert caches.shards(several) == caches.shards(masked)


def test_masks_of_another_factor_are_not_copied(tmp_path: Path) -> None:
    """The VAE of 32 pixels per latent pixel replaces one of 8."""
    project = caches.write_project(tmp_path / "project", "sana", extra='mask_path = "masks"\n')
    project.data(project.data_toml.read_text().replace("resolutions", "side_step = 32\nresolutions"))
    write_masks(project)
    caches.build(project)
    deep_compression_vae(levels=6).save_pretrained(project.model / "vae")
    report = caches.build(project)
    assert caches.counted(report) == (caches.COUNT, 0)
    assert {np.shape(mask) for mask in stored_masks(project).values()} == {(2, 2)}


@pytest.mark.parametrize("tables", ["", LORA], ids=["full", "lora"])
def test_a_masked_run_resumes_from_shards_and_from_memory(tmp_path: Path, tiny_folder: TinyFolder, tables: str) -> None:
    project = write_project(tmp_path, tiny_folder("flux"))
    project.train_toml.write_text(project.train_toml.read_text() + tables)
    run(project, "plain")
    shutil.rmtree(project.cache)
    model = check.load(project.train_toml).train.model
    write_cache(project.cache, family_of(model), model, BUCKETS, masked=True)
    require_exact_resume(project, later=['cache_residence="host"'])
    losses = project.losses("whole")
    assert project.losses("parts") == losses
    assert all(losses[step] != loss for step, loss in project.losses("plain").items())
