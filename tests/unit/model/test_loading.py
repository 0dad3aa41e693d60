"""Models that one thread builds or loads do not depend on what another thread builds or loads at the same time."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sd3_light.assets import DEMO
from sd3_light.config import SIZES
from sd3_light.config.faults import UserError
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.families.sd3.weights import SD3Weights
from sd3_light.model.loading import load_diffusers_model

CONFIG = SIZES["tiny2"].transformer_config()
FILE = "diffusion_pytorch_model.safetensors"
BIAS = "proj_out.bias"
KAIMING = nn.init.kaiming_uniform_
Meanwhile = Callable[[Callable[[], Any]], list[Any]]


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meanwhile]:
    """Return a function that runs work in another thread whenever this one is inside the constructor of a layer."""
    results: list[Any] = []

    def start(work: Callable[[], Any]) -> list[Any]:
        construct = nn.Conv2d.__init__

        def construct_later(*args: Any, **options: Any) -> None:
            if not results:
                results.append(None)
                results[0] = pool.submit(work).result()
            construct(*args, **options)

        monkeypatch.setattr(nn.Conv2d, "__init__", construct_later)
        return results

    with ThreadPoolExecutor(1) as pool:
        yield start


@pytest.fixture(scope="module")
def denoiser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "transformer"
    new_transformer(CONFIG, 0).save_pretrained(folder)
    return folder


def assert_same(model: nn.Module, state: dict[str, Tensor]) -> None:
    loaded = model.state_dict()
    assert loaded.keys() == state.keys()
    assert not any(tensor.is_meta for tensor in loaded.values()), "weights without values"
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_given_weights_arrive_while_another_thread_loads_a_model(meanwhile: Meanwhile) -> None:
    """An export is written while training, or a task's own code, loads a VAE with diffusers."""
    state = new_transformer(CONFIG, 0).state_dict()
    built = meanwhile(lambda: SD3Weights().from_state(CONFIG, state))
    AutoencoderKL.from_pretrained(DEMO / "vae")
    assert_same(built[0], state)


@pytest.mark.parametrize(("model_class", "part"), [(AutoencoderKL, "vae"), (SD3Transformer2DModel, "transformer")])
def test_loading_does_not_change_what_another_thread_builds(meanwhile: Meanwhile, model_class: Any, part: str) -> None:
    """A task's own code builds modules while an export is verified."""
    built = meanwhile(lambda: (nn.Linear(2, 2), nn.init.kaiming_uniform_))
    load_diffusers_model(model_class, DEMO / part, torch.bfloat16)
    layer, initialise = built[0]
    assert (layer.weight.device.type, layer.weight.dtype) == ("cpu", torch.float32)
    assert initialise is KAIMING, "the layer would keep uninitialised memory"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_size", ["10GB", "100KB"])
def test_a_model_loads_as_with_diffusers(denoiser: Path, tmp_path: Path, dtype: torch.dtype, shard_size: str) -> None:
    stock = SD3Transformer2DModel.from_pretrained(denoiser, dtype=dtype)
    SD3Transformer2DModel.from_pretrained(denoiser).save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / FILE).is_file() == (shard_size == "10GB")
    model = load_diffusers_model(SD3Transformer2DModel, tmp_path, dtype)
    assert_same(model, stock.state_dict())
    assert not model.training
    assert {**model.config, "_name_or_path": ""} == {**stock.config, "_name_or_path": ""}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop(BIAS), r"do not match its config\.json: proj_out\.bias is missing"),
        (lambda state: state.update({BIAS: torch.zeros(3)}), r"proj_out\.bias has shape \[3\], not \[\d+\]; download"),
    ],
)
def test_weights_of_another_config_are_refused(denoiser: Path, tmp_path: Path, change: Any, message: str) -> None:
    state = load_file(denoiser / FILE)
    change(state)
    save_file(state, tmp_path / FILE)
    (tmp_path / "config.json").write_bytes((denoiser / "config.json").read_bytes())
    with pytest.raises(UserError, match=message):
        load_diffusers_model(SD3Transformer2DModel, tmp_path, torch.float32)
