"""An adapter on a GPU: frozen weights in bf16, adapter weights in float32, and a falling loss."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.config import SIZES, TrainConfig
from sd3_light.core.registry import family_named
from sd3_light.engines import Launch
from sd3_light.engines.torch import TorchEngine
from sd3_light.export.trainable import load_what_trains
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.model.adapter_layers import is_adapter_name
from tests.gpu.test_engine import batch

DEVICE = torch.device("cuda", 0)


def make_engine(folder: Path, **keys: Any) -> TorchEngine:
    adapter = {"rank": 4, "target_modules": ["attn.to_*", "ff.net.*"], **keys}
    model = {"type": "sd3", "diffusers_path": "folder"}
    settings = {"output_dir": "out", "dataset": "data.toml", "max_steps": 9, "model": model}
    config = TrainConfig.model_validate({**settings, "adapter": adapter}, context={"base": folder})
    transformer = new_transformer(SIZES["tiny2"].transformer_config(), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    transformer.save_pretrained(folder / "folder" / "transformer")
    denoiser: Any = load_what_trains(config, family_named("sd3").weights.start(config.model), DEVICE)
    assert all(weight.device == DEVICE for name, weight in denoiser.named_parameters() if not is_adapter_name(name))
    return TorchEngine(SD3TrainingModule(denoiser, config), config, Launch(), DEVICE)


KINDS = [{}, {"dtype": "float32"}, {"use_dora": True}, {"type": "lokr"}, {"type": "loha"}]


@pytest.mark.parametrize("keys", KINDS, ids=str)
def test_an_adapter_trains_over_bf16_weights(tmp_path: Path, keys: dict[str, Any]) -> None:
    engine = make_engine(tmp_path, **keys)
    kinds = {(is_adapter_name(name), weight.dtype) for name, weight in engine.module.denoiser.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    frozen = {n: p.clone() for n, p in engine.module.denoiser.named_parameters() if not is_adapter_name(n)}
    losses = [engine.train_step([batch(0)], 1e-2).read().losses["loss"] for _ in range(20)]
    assert losses[-1] < losses[0]
    now = dict(engine.module.denoiser.named_parameters())
    assert all(torch.equal(now[name], before) for name, before in frozen.items())


@pytest.mark.parametrize("keys", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("bits", [8, 4])
def test_an_adapter_trains_over_quantized_weights(tmp_path: Path, bits: int, keys: dict[str, Any]) -> None:
    """The blocks' frozen matrices are quantized, outputs stay close, and the model can be moved between devices."""
    if bits == 4:
        pytest.importorskip("bitsandbytes")
    engine, unquantized = (make_engine(tmp_path, base_bits=count, **keys) for count in (bits, 16))
    frozen = {n: p for n, p in engine.module.denoiser.named_parameters() if not is_adapter_name(n)}
    quantized = {name for name, weight in frozen.items() if not weight.is_floating_point()}
    assert quantized
    assert all(name.startswith("transformer_blocks.") for name in quantized)
    assert all(weight.dtype == torch.bfloat16 for name, weight in frozen.items() if name not in quantized)
    inputs = batch(0)
    output, exact = engine.denoise(inputs), unquantized.denoise(inputs)
    assert ((output - exact).norm() / exact.norm()).item() < (0.05 if bits == 8 else 0.3)
    losses = [engine.train_step([batch(0)], 1e-2).read().losses["loss"] for _ in range(20)]
    assert losses[-1] < losses[0]
    after = engine.denoise(inputs)
    engine.module.to("cpu")
    engine.module.to(DEVICE)
    assert torch.equal(engine.denoise(inputs), after)
