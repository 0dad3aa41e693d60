"""Tasks in less memory: blocks in host memory and frozen weights of 8 bits, as a train TOML has them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sd3_light.config import TrainConfig, UserError
from sd3_light.core.batch import Batch
from sd3_light.core.registry import family_of_folder
from sd3_light.export.trainable import load_what_trains, swap_loaded
from sd3_light.model.block_swap import is_swapped
from sd3_light.tasks import DiffusionTrainingModule
from tests.families import make_pipeline
from tests.unit.tasks.test_check import Blocks
from tests.unit.tasks.toy import Encode, steps, train

CPU = torch.device("cpu")


class Task(Blocks):
    def __init__(self, adapter: bool = True) -> None:
        torch.manual_seed(0)
        super().__init__(Encode())
        self.encoder = nn.Conv2d(3, 3, 1)
        if adapter:
            self.train_adapter(rank=2, target_modules=["blocks.*.0", "blocks.*.2"])


def losses(folder: Path, model: Task, **settings: Any) -> list[Any]:
    return steps(train(folder, model, batch_size=2, max_steps=4, **settings), "loss", "grad_norm")


@pytest.mark.parametrize("engine", ["torch", "accelerate"])
def test_blocks_in_host_memory_train_alike(tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = losses(tmp_path / "plain", Task(), engine=engine)
    assert expected
    for setting, count in ((2, 2), ("all", 3)):
        model = Task()
        assert losses(tmp_path / str(setting), model, engine=engine, swap_blocks=setting) == expected
        assert is_swapped(model.transformer)
        assert f"blocks in host memory: {count} (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("adapter", "settings", "message"),
    [
        (False, {"swap_blocks": 2}, "only frozen weights under an adapter are swapped; call train_adapter"),
        (True, {"swap_blocks": 2, "engine": "torch", "parallel": "fsdp2"}, "swap_blocks needs whole weights"),
        (True, {"swap_blocks": -1}, "swap_blocks"),
    ],
)
def test_what_cannot_be_swapped(tmp_path: Path, adapter: bool, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(tmp_path, Task(adapter), **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "flux"
    make_pipeline("flux").save_pretrained(path)
    return path


@pytest.mark.parametrize(("bits", "swapped"), [(8, 0), (16, "all"), (8, "all")])
def test_a_task_has_the_loss_of_a_config(folder: Path, bits: int, swapped: Any) -> None:
    family: Any = family_of_folder(folder)
    adapter = {"type": "lora", "rank": 2, "base_bits": bits}
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "swap_blocks": swapped, "adapter": adapter}
    table["model"] = {"diffusers_path": str(folder), "dtype": "float32"}
    config = family.completed(TrainConfig.model_validate(table, context={"base": Path()}))
    start = family.weights.start(config.model)
    of_config = load_what_trains(config, start, CPU)
    task = DiffusionTrainingModule(family.weights.load(start, 0), seed=config.seed)
    task.train_adapter(rank=2, base_bits=bits, target_modules=list(family.adapter_targets))
    swap_loaded(task.transformer, swapped, CPU)
    torch.manual_seed(0)
    values = {"noisy": torch.randn(2, 4, 8, 8), "t": torch.rand(2), "text": torch.randn(2, 6, 32)}
    batch = Batch(2, {**values, "pooled": torch.randn(2, 32)})
    target = torch.randn(2, 4, 8, 8)
    results = []
    for denoiser in (of_config, task.transformer):
        value = (family.denoise(denoiser, batch, 1.0) - target).square().mean()
        value.backward()
        grads = {name: weight.grad for name, weight in denoiser.named_parameters() if weight.grad is not None}
        results.append((value, grads))
    (one, one_grads), (other, other_grads) = results
    assert torch.equal(one, other)
    assert one_grads.keys() == other_grads.keys()
    assert all(torch.equal(grad, other_grads[name]) for name, grad in one_grads.items())
