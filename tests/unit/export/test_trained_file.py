"""The file of trained weights replaces an earlier one only when it is complete."""

from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel

from sd3_light.config import SIZES, AdapterConfig
from sd3_light.export import adapter_folder
from sd3_light.export.trained_file import write_trained


def lora_state(value: float) -> dict[str, torch.Tensor]:
    layer = "transformer_blocks.0.attn.to_q"
    width = SIZES["tiny2"].width
    return {
        f"{layer}.lora_A.default.weight": torch.full((2, width), value),
        f"{layer}.lora_B.default.weight": torch.full((width, 2), value),
    }


def test_a_failed_save_keeps_the_earlier_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = SD3Transformer2DModel(**SIZES["tiny2"].transformer_config())
    adapter = AdapterConfig(type="lora", rank=2, alpha=2)
    path = tmp_path / "lora.safetensors"
    write_trained(path, lora_state(1.0), transformer, adapter)
    earlier = path.read_bytes()
    write_trained(path, lora_state(2.0), transformer, adapter)
    assert path.read_bytes() != earlier
    replaced = path.read_bytes()

    def fail(*_: object, **__: object) -> Path:
        raise OSError("no space left")

    monkeypatch.setattr(adapter_folder, "write_lora", fail)
    with pytest.raises(OSError, match="no space left"):
        write_trained(path, lora_state(3.0), transformer, adapter)
    assert path.read_bytes() == replaced
    assert [file.name for file in tmp_path.iterdir()] == ["lora.safetensors"]
