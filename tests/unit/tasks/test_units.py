"""Units: which ones are computed once follows from what they declare."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.tasks.module import DiffusionTrainingModule
from sd3_light.tasks.units import PipelineUnit, split_units


class Encode(PipelineUnit):
    reads, writes, uses = ("image", "extra?"), ("moments",), ("vae",)

    def __init__(self) -> None:
        self.calls = 0

    def run(self, module: Any, image: Tensor, extra: float = 0.0) -> dict[str, Tensor]:
        self.calls += 1
        return {"moments": module.vae(image) + extra}


class DrawLatents(PipelineUnit):
    reads, writes, draws = ("moments",), ("latents",), True

    def run(self, module: Any, moments: Tensor, draw: Any) -> dict[str, Tensor]:
        return {"latents": moments + draw("posterior", tuple(moments.shape))}


class Later(PipelineUnit):
    reads, writes = ("latents",), ("doubled",)

    def run(self, module: Any, latents: Tensor) -> dict[str, Tensor]:
        return {"doubled": 2 * latents}


class Learned(PipelineUnit):
    reads, writes, uses = ("text",), ("context",), ("transformer",)

    def run(self, module: Any, text: Tensor) -> dict[str, Tensor]:
        return {"context": text.float() * module.transformer.weight.mean()}


class Module(DiffusionTrainingModule):
    reads = ("context",)

    def __init__(self, *units: PipelineUnit) -> None:
        super().__init__(nn.Linear(4, 4), units or (Encode(), DrawLatents(), Later(), Learned()))
        self.vae = nn.Linear(4, 4)
        self.freeze_the_rest()

    def denoise(self, noisy: Tensor, t: Tensor, inputs: Any) -> Tensor:
        velocity: Tensor = self.transformer(noisy) + inputs["context"][:, None]
        return velocity


def names(units: Any) -> list[str]:
    return [type(unit).__name__ for unit in units]


def sample(index: int = 0, epoch: int = 0) -> dict[str, Any]:
    random = torch.Generator().manual_seed(index)
    data = {"image": torch.randn(4, generator=random), "text": float(index), "unused": "x"}
    return {"data": data, "data_id": index, "epoch": epoch, "repeat": 0}


def test_the_split_is_derived() -> None:
    split = Module().split()
    assert names(split.cached) == ["Encode"]
    assert names(split.drawn) == ["DrawLatents", "Later"]
    assert names(split.gradient) == ["Learned"]
    assert set(split.stored) == {"moments", "text", "mask", "loss_weight"}, "and the optional inputs of the loss"
    module = Module()
    module.vae.requires_grad_(True)
    split = split_units(module, module.units, ("latents", "context"))
    assert names(split.gradient) == ["Encode", "DrawLatents", "Later", "Learned"]
    assert split.cached == ()
    assert names(module.split().cached) == ["Encode"], "everything outside the denoiser is frozen"


def test_a_sample_does_not_depend_on_its_batch() -> None:
    module = Module()
    both, alone = module.each([sample(1), sample(2)]), torch.cat([module.each([sample(1)]), module.each([sample(2)])])
    assert torch.allclose(both, alone, atol=1e-6)
    assert not torch.allclose(module.each([sample(1, epoch=1)]), alone[:1]), "another epoch draws again"
    at_half = module.each([sample(1)], quantile=0.5)
    assert torch.equal(at_half, module.each([sample(1, epoch=1)], quantile=0.5)), "validation always draws the same"
    assert module(sample(1)["data"]).ndim == 0, "a bare item is a sample too"


def test_errors_name_unit_and_value() -> None:
    with pytest.raises(UserError, match="unit DrawLatents reads 'moments' before it is written"):
        Module(DrawLatents(), Encode()).split()
    bare = {**sample(), "data": {"text": 1.0}}
    with pytest.raises(UserError, match="unit Encode reads 'image'; it is neither in the data nor written"):
        Module().each([bare])

    class WrongWrites(Encode):
        def run(self, module: Any, image: Tensor, extra: float = 0.0) -> dict[str, Tensor]:
            return {"other": image}

    with pytest.raises(UserError, match=r"unit WrongWrites declares .* \['moments'\] but wrote \['other'\]"):
        Module(WrongWrites(), DrawLatents(), Later(), Learned()).each([sample()])


class ProcessEncode:
    """DiffSynth's interface, without its base class; draws from the global generator."""

    input_params, output_params, onload_model_names = ("image", "missing"), ("moments", "mask"), ("vae",)

    def process(self, pipe: Any, image: Tensor, missing: Any) -> dict[str, Tensor]:
        assert missing is None
        assert image.shape == (4,), "values of the data are passed as they are"
        return {"moments": (pipe.vae(image) + torch.rand(4))[None]}


class ProcessPrompt(PipelineUnit):
    """Derived from our class, with the positive side of guidance."""

    def __init__(self) -> None:
        sides = {"input_params_posi": {"value": "text"}, "input_params_nega": {"value": "negative"}}
        super().__init__(seperate_cfg=True, input_params=("moments",), output_params=("shifted",), **sides)

    def process(self, pipe: Any, value: float, moments: Tensor) -> dict[str, Tensor]:
        assert moments.shape == (1, 4), "values of earlier units are batches of one"
        return {"shifted": moments + value}


class ProcessModule(DiffusionTrainingModule):
    reads = ("shifted",)

    def __init__(self, *units: Any) -> None:
        units = units or (ProcessEncode(), ProcessPrompt(), DrawLatents())
        super().__init__(nn.Linear(4, 4), units)
        self.pipe = nn.Module()
        self.pipe.vae = nn.Linear(4, 4)

    def denoise(self, noisy: Tensor, t: Tensor, inputs: Any) -> Tensor:
        velocity: Tensor = self.transformer(noisy) + inputs["shifted"]
        return velocity


def test_units_with_diffsynths_interface_work_beside_ours() -> None:
    module = ProcessModule()
    split = module.split()
    assert [unit.label for unit in split.cached] == ["ProcessEncode", "ProcessPrompt"]
    assert names(split.drawn) == ["DrawLatents"]
    stored = module.process(sample(1)["data"], 1)
    assert {name: tuple(value.shape) for name, value in stored.items()} == {"moments": (4,), "shifted": (4,)}
    assert torch.equal(stored["moments"], module.process(sample(1)["data"], 1)["moments"]), "draws belong to the sample"
    whole = module([sample(1), sample(2)])
    cached = [{**sample(n), "data": module.process(sample(n)["data"], n)} for n in (1, 2)]
    del module.pipe.vae
    assert torch.equal(module(cached), whole), "the second stage needs neither the image nor the encoder"


def test_units_with_diffsynths_interface_have_limits() -> None:
    class TakesOver(ProcessEncode):
        take_over = True

    class Wide(ProcessEncode):
        def process(self, pipe: Any, image: Tensor, missing: Any) -> dict[str, Tensor]:
            return {"moments": torch.zeros(2, 4)}

    class Trains(ProcessEncode):
        onload_model_names = ("dit",)

    for unit, message in (
        (TakesOver(), "unit TakesOver takes over the unit runner; call it in a custom forward"),
        (Wide(), r"unit Wide wrote 'moments' of shape \(2, 4\); write a batch of one sample"),
        (Trains(), "unit Trains uses a part that trains; call its process"),
    ):
        module = ProcessModule(unit, ProcessPrompt(), DrawLatents())
        module.pipe.dit = module.transformer
        with pytest.raises(UserError, match=message):
            module([sample()])
    with pytest.raises(UserError, match="unit PipelineUnit does not know 'output'; it knows input_params"):
        PipelineUnit(output=("a",))


class Both(PipelineUnit):
    reads, writes = ("image",), ("latents", "unread")

    def run(self, module: Any, image: Tensor) -> dict[str, Tensor]:
        return {"latents": image, "unread": image}


def test_a_result_that_nothing_reads_is_neither_stored_nor_missed() -> None:
    module = Module(Both(), Learned())
    stored = module.process(sample()["data"])
    assert set(stored) == {"latents", "text"}
    assert torch.equal(module([{**sample(), "data": stored}]), module([sample()]))
