"""Which encoders are on the device: the decision and its execution."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from sd3_light.cost.amount import GIB
from sd3_light.encoding import placement
from sd3_light.encoding.placement import PlacedModules, all_fit, free_memory, weight_bytes
from sd3_light.model.block_swap import is_swapped
from tests.poisoned import poison

# SD3's encoders: VAE in float32, CLIP-L, CLIP-G and T5-XXL in bfloat16
SD3 = [int(size * GIB) for size in (0.31, 0.23, 1.29, 8.87)]


@pytest.mark.parametrize(
    ("free_gib", "batch_size", "fit"),
    [
        (139, 32, True),
        (79, 32, True),
        (24, 32, True),
        (19, 32, False),
        (15.5, 8, False),
        (15.8, 16, True),
        (8, 1, False),
    ],
)
def test_sd3_fits_by_weights_and_activations(free_gib: float, batch_size: int, fit: bool) -> None:
    assert all_fit(SD3, batch_size, int(free_gib * GIB)) is fit


def test_the_memory_needed_is_exact() -> None:
    need = 100 + 32 * 256 * 256 * 4096 + GIB
    assert all_fit([60, 40], 32, need)
    assert not all_fit([60, 41], 32, need)
    # memory for one 1024x1024 image is reserved even for small batches
    assert all_fit([0], 1, 5 * GIB)
    assert not all_fit([0], 1, 5 * GIB - 1)
    assert all_fit(SD3, 32, None), "unknown memory counts as enough"


def test_free_host_memory_is_reported_by_the_system() -> None:
    free = free_memory(torch.device("cpu"))
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    total = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal")), None)
    assert (free is None) == (total is None)
    assert free is None or total is None or 0 < free <= total


def test_weight_bytes_equal_those_of_the_loaded_model(demo_parts: Path) -> None:
    from sd3_light.families.sd3.text import load_text_model

    for name, folder in (("clip_g", "text_encoder_2"), ("t5", "text_encoder_3")):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            model = load_text_model(name, demo_parts, torch.device("cpu"), dtype)
            loaded = sum(parameter.nbytes for parameter in model.parameters())
            assert weight_bytes(demo_parts / folder, dtype) == loaded, (name, dtype)


def test_weights_are_counted_once_without_their_variants(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.zeros(7)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"c": torch.zeros(70)}, tmp_path / "model.fp16-00001-of-00001.safetensors")
    names = {"a": 1, "b": 1, "c": 2}
    index = ", ".join(f'"{name}": "model-0000{number}-of-00002.safetensors"' for name, number in names.items())
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{index}}}}}')
    (tmp_path / "model.safetensors.index.fp16.json").write_text("{}")
    assert weight_bytes(tmp_path, torch.bfloat16) == 48
    (tmp_path / "whole").mkdir()
    save_file({"a": torch.zeros(3, 5)}, tmp_path / "whole" / "model.safetensors")
    save_file({"a": torch.zeros(3, 5).half()}, tmp_path / "whole" / "model.fp16.safetensors")
    assert weight_bytes(tmp_path / "whole", torch.float32) == 60


class Loads:
    """Loaders of two small modules, with a record of (name, device)."""

    def __init__(self) -> None:
        self.record: list[tuple[str, str]] = []

    def __call__(self) -> dict[str, Callable[[torch.device], Any]]:
        def loader(name: str) -> Callable[[torch.device], Any]:
            def load(device: torch.device) -> nn.Module:
                self.record.append((name, device.type))
                return nn.BatchNorm1d(3).to(device)

            return load

        return {name: loader(name) for name in ("one", "two")}


def test_resident_modules_are_loaded_once_on_the_device_and_freed() -> None:
    loads = Loads()
    modules = PlacedModules(loads(), torch.device("meta"), one_at_a_time=False)
    one = modules.get("one")
    modules.get("two")
    assert modules.get("one") is one
    assert loads.record == [("one", "meta"), ("two", "meta")]
    modules = PlacedModules(Loads()(), torch.device("cpu"), one_at_a_time=False)
    references = [weakref.ref(modules.get(name)) for name in ("one", "two")]
    modules.clear()
    assert [reference() for reference in references] == [None, None]


def test_one_at_a_time_on_a_cpu_forgets_the_other() -> None:
    loads = Loads()
    modules = PlacedModules(loads(), torch.device("cpu"), one_at_a_time=True)
    one = weakref.ref(modules.get("one"))
    assert one() is modules.get("one")
    modules.get("two")
    assert one() is None
    modules.get("one")
    assert [name for name, _ in loads.record] == ["one", "two", "one"]


def test_one_at_a_time_on_a_gpu_moves_between_the_host_and_the_device() -> None:
    """Simulated on the CPU: weights on the device are copies; offloading restores the host's tensors."""
    loads = Loads()
    modules = PlacedModules(loads(), torch.device("cpu"), one_at_a_time=True)
    modules.keeps_host_copy = True
    one = modules.get("one")
    on_device = [one.weight.data_ptr(), one.running_mean.data_ptr()]
    one.weight.data.fill_(9.0)  # would change the host's weights if it were copied back
    two = modules.get("two")
    on_host = [one.weight.data_ptr(), one.running_mean.data_ptr()]
    assert not set(on_device) & set(on_host)
    assert (one.weight == 1).all()
    assert modules.get("one") is one
    assert one.weight.data_ptr() not in on_host
    assert modules.get("two") is two
    assert len(loads.record) == 2


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("free", [None, 1 << 40, 1 << 30])
def test_a_module_that_does_not_fit_alone_runs_layer_by_layer(monkeypatch: Any, capsys: Any, free: int | None) -> None:
    monkeypatch.setattr(placement, "free_memory", lambda device: free)
    loaders = {"text": lambda device: Layers(), "vae": lambda device: Layers()}
    modules = PlacedModules(loaders, torch.device("cpu"), one_at_a_time=True, by_layer=["text"])
    modules.keeps_host_copy = True
    x = torch.randn(3, 8)
    expected = Layers()(x)
    for _ in range(2):
        for name in ("text", "vae"):
            assert torch.equal(modules.get(name)(x), expected)
            assert is_swapped(modules.get(name)) == (name == "text" and free == 1 << 30)
    assert modules.get("text").first.weight.requires_grad == (free != 1 << 30)
    assert ("layers are copied one by one" in capsys.readouterr().err) == (free == 1 << 30)


def text_encoder(name: str) -> Any:
    """Return a text encoder of five layers."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "num_hidden_layers": 5, "hidden_size": 16, "intermediate_size": 32}
    if name == "CLIPTextModel":
        return transformers.CLIPTextModel(transformers.CLIPTextConfig(**sizes, num_attention_heads=2)).eval()
    config = getattr(transformers, name.replace("EncoderModel", "Config"))
    sizes = {"vocab_size": 50, "num_layers": 5, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
    return getattr(transformers, name)(config(**sizes)).eval()


@pytest.mark.parametrize("name", ["T5EncoderModel", "UMT5EncoderModel", "CLIPTextModel"])
def test_text_encoders_run_layer_by_layer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = text_encoder(name)(ids).last_hidden_state
    needed = poison(monkeypatch)
    monkeypatch.setattr(placement, "free_memory", lambda device: 0)
    modules = PlacedModules({"text": lambda device: text_encoder(name)}, torch.device("cpu"), True, ["text"])
    modules.keeps_host_copy = True
    values = []
    for _ in range(2):
        encoder = modules.get("text")
        with torch.inference_mode():
            values.append(encoder(ids).last_hidden_state)
    assert needed == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert all(torch.equal(value, expected) for value in values)
