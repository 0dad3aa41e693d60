"""The encoders of every stock family against its pipeline and VAE."""

import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sd3_light.config import UserError
from sd3_light.core.columns import Bucket
from sd3_light.core.registry import family_named
from sd3_light.encoding import placement
from sd3_light.encoding.vae import LatentScale, load_vae
from sd3_light.families.base import StockFamily
from sd3_light.families.stock.encoders import StockEncoders, caption_batches
from tests.families import TinyFolder
from tests.poisoned import poison
from tests.stock import model_table, save_stock
from tests.unit.families.test_stock_images import FAMILIES, LENGTHS

CPU = torch.device("cpu")
CAPTIONS = ["a red fox", "", "two cats on a mat", "a very long caption of a house", "a bird"]
SIZE = (32, 64)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: Any, stock_folder: TinyFolder) -> tuple[StockFamily, Path]:
    family: Any = family_named(request.param)
    return family, stock_folder(request.param)


def open_encoders(family: StockFamily, folder: Path, batch: int = 2, **options: Any) -> StockEncoders:
    model = model_table(family.name, folder, text_max_length=LENGTHS.get(family.name, 80))
    encoders = family.encoding.encoders(model, CPU, batch, **options)
    assert isinstance(encoders, StockEncoders)
    return encoders


def test_captions_are_those_of_the_stock_pipeline(folder: tuple[StockFamily, Path]) -> None:
    family, path = folder
    with open_encoders(family, path, batch=1) as encoders:
        assert encoders.tokenize(CAPTIONS) == {"text": CAPTIONS}
        tensors = encoders.encode_captions(CAPTIONS)
        columns = family.text_columns(encoders._model, path)
        empty = encoders.encode_empty()
    assert set(tensors) == {name for column in columns for name in column.tensors}
    pipe = getattr(diffusers, family.pipeline).from_pretrained(path, transformer=None, vae=None)
    for number, caption in enumerate(CAPTIONS):
        with torch.no_grad():
            encoded = family.encode_captions(pipe, [caption], encoders._model)
        for column in columns:
            value = encoded[column.name][0].bfloat16()
            if column.ragged:
                start, end = tensors[f"{column.name}.start"][number : number + 2].tolist()
                assert torch.equal(tensors[f"{column.name}.tokens"][start:end], value)
                assert end - start <= column.shape[0]
            else:
                assert torch.equal(tensors[column.name][number], value)
                assert value.shape == column.shape
    with torch.no_grad():
        expected = family.encode_empty(pipe, encoders._model)
    for column in columns:
        stored = empty[f"{column.name}.tokens"] if column.ragged else empty[column.name][0]
        assert torch.equal(stored, expected[column.name].bfloat16())


def test_bytes_depend_on_the_captions_alone_and_only_needed_encoders_run(folder: tuple[StockFamily, Path]) -> None:
    family, path = folder
    with open_encoders(family, path) as first, open_encoders(family, path, one_at_a_time=True) as second:
        second.encode_images(np.zeros((1, *SIZE, 3), np.uint8), flip=False)
        one = first.encode_captions(CAPTIONS)
        two = second.encode_captions(second.tokenize(CAPTIONS))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    ran: list[str] = []
    with open_encoders(family, path) as encoders:
        expected = encoders.encode_captions(CAPTIONS)
        for name, module in encoders.part("text").items():
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
        for column in family.text_columns(encoders._model, path):
            ran.clear()
            tensors = encoders.encode_captions(CAPTIONS, [column.name])
            assert set(ran) == {column.parts[0]}
            assert set(tensors) == set(column.tensors)
            assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
        ran.clear()
        encoders.encode_images(np.zeros((1, *SIZE, 3), np.uint8), flip=False)
    assert ran == []


def test_layers_copied_one_by_one_encode_the_same_bytes(
    folder: tuple[StockFamily, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU with little memory: the VAE and the text encoders take turns, and so do the layers of the latter."""
    family, path = folder
    with open_encoders(family, path) as encoders:
        expected = encoders.encode_captions(CAPTIONS)
        empty = encoders.encode_empty()
    needed = poison(monkeypatch)
    monkeypatch.setattr(placement, "BUFFERS", 0)  # tiny encoders have one layer or two
    monkeypatch.setattr(placement, "free_memory", lambda device: 1 << 20)
    pixels = np.zeros((1, *SIZE, 3), np.uint8)
    with open_encoders(family, path, one_at_a_time=True) as encoders:
        encoders.encode_images(pixels, flip=False)
        encoders._modules.keeps_host_copy = True
        first = encoders.encode_captions(CAPTIONS)
        encoders.encode_images(pixels, flip=False)
        second = encoders.encode_captions(CAPTIONS)
        assert all(torch.equal(encoders.encode_empty()[name], empty[name]) for name in empty)
    assert needed
    for tensors in (first, second):
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    lines = capsys.readouterr().err.splitlines()
    assert sum("layers are copied one by one from host memory" in line for line in lines) == 1


def test_images_have_the_moments_that_the_columns_declare(folder: tuple[StockFamily, Path]) -> None:
    family, path = folder
    pixels = np.random.default_rng(0).integers(0, 256, (3, *SIZE, 3), dtype=np.uint8)
    with open_encoders(family, path) as encoders:
        moments = encoders.encode_images(pixels, flip=True)["moments"]
        decoded = encoders.reconstruct(pixels)
    column = family.columns(encoders._model, path, Bucket(SIZE[1], SIZE[0]))[0]
    assert moments.shape == (3, 2, *column.shape)
    assert moments.dtype == torch.float16
    assert decoded.shape == pixels.shape
    mirrored = pixels[:, :, ::-1].copy()
    with open_encoders(family, path) as encoders:
        assert torch.equal(encoders.encode_images(mirrored, flip=False)["moments"][:, 0], moments[:, 1])
    scale = LatentScale.of_folder(path)
    latents = scale.draw(moments[:, 0], None)
    assert latents.shape[1:] == family.sampling.latent_shape(encoders._model, (SIZE[1], SIZE[0]))
    with family.sampling.decoder(encoders._model, CPU) as decoder:
        images = decoder.decode(latents)
    images = images[:, :, 0] if images.dim() == 5 else images  # a clip of one frame
    difference = (images * 255).permute(0, 2, 3, 1) - torch.from_numpy(decoded)
    assert difference.abs().max() < 1, "normalising and its inverse cancel out"


def test_flux2_is_normalised_as_its_pipeline_does(tmp_path: Path) -> None:
    path = save_stock("flux2", tmp_path / "model")
    scale = LatentScale.of_folder(path)
    pipe = diffusers.Flux2KleinPipeline.from_pretrained(path, text_encoder=None, tokenizer=None)
    pixels = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = pipe._encode_vae_image(pixels, generator=None)
        mean = pipe.vae.encode(pixels).latent_dist.mean
    assert torch.equal(pipe._patchify_latents(scale.normalise(mean)), expected)
    assert LatentScale.of_folder(path) == scale
    file = path / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != "bn.running_var"}
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"lacks bn.running_var, by which its latents are normalised"):
        LatentScale.of_folder(path)


def test_broken_folders_are_named(tmp_path: Path) -> None:
    family: Any = family_named("flux")
    path = save_stock("flux", tmp_path / "model")
    weights = path / "text_encoder_2" / "model.safetensors"
    tensors = load_file(weights)
    broken = {name: tensor.fill_(float("nan")) if "wo" in name else tensor for name, tensor in tensors.items()}
    save_file(broken, weights, {"format": "pt"})
    with open_encoders(family, path) as encoders, pytest.raises(UserError, match=r"text_encoder_2, computed .* NaN"):
        encoders.encode_captions(["a fox"])
    shutil.rmtree(path / "tokenizer_2")
    with open_encoders(family, path) as encoders, pytest.raises(UserError, match=r"tokenizer_2 cannot be loaded"):
        encoders.encode_captions(["a fox"])
    (path / "vae" / "config.json").write_text('{"_class_name": "print"}')
    with pytest.raises(UserError, match=r"its VAE is a 'print', which diffusers lacks"):
        load_vae(path, CPU, torch.float32)


def test_how_much_of_a_caption_is_read(stock_folder: TinyFolder) -> None:
    limits = family_named("flux").encoding.text_limits(stock_folder("flux"), {"text_max_length": 12})
    assert [(limit.encoder, limit.tokens) for limit in limits] == [("clip", 16), ("t5", 12)]
    assert limits[1].count("a red fox") > 1
    assert "raise text_max_length" in limits[1].remedy
    assert list(caption_batches(["a", "ccc", "bb", "ddd"], 3)) == [[1, 3, 2], [0]]
    assert list(caption_batches([], 3)) == []
