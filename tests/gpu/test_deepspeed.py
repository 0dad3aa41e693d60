"""The DeepSpeed engines on a GPU in bf16 match the torch engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.config import SIZES, TrainConfig
from sd3_light.engines import Engine, Launch, deepspeed
from sd3_light.engines.torch import TorchEngine
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.families.sd3.random_weights import new_transformer
from tests.gpu.test_engine import batch

CUDA = torch.device("cuda", 0)
MODEL = {"diffusers_path": "folder", "train_type": "sd3_light_pretrain", "size": "tiny2"}
STEPS = 6


def make(folder: Path, by_deepspeed: bool, zero: int, device: torch.device = CUDA) -> Engine:
    keys: dict[str, Any] = {"output_dir": "out", "dataset": "data.toml", "max_steps": 10, "model": MODEL}
    keys |= {"zero_stage": zero, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1}
    config = TrainConfig.model_validate(keys, context={"base": folder})
    module = SD3TrainingModule(new_transformer(SIZES["tiny2"].transformer_config(), 0), config)
    make_engine = deepspeed.make_engine if by_deepspeed else TorchEngine
    return make_engine(module, config, Launch(), device)


def curve(engine: Engine) -> list[float]:
    values = []
    for step in range(STEPS):
        numbers = engine.train_step([batch(2 * step), batch(2 * step + 1)], 2e-3).read()
        assert numbers.taken
        values += [numbers.losses["loss"], numbers.grad_norm]
    return values


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeed_matches_torch(tmp_path: Path, zero: int) -> None:
    pytest.importorskip("deepspeed")
    torch_curve, deepspeed_curve = (curve(make(tmp_path, by_deepspeed, zero)) for by_deepspeed in (False, True))
    assert deepspeed_curve == pytest.approx(torch_curve, rel=2e-3)
