"""An export is the model that its config promises, whole and proven, or an error that names what is not."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd3_light.config import SIZES
from sd3_light.config.faults import UserError
from sd3_light.export import folder as folder_module
from sd3_light.export.card import model_card
from sd3_light.export.folder import FROZEN, ExportError, ExportSpec, checked_copy, read_facts, write_folder
from sd3_light.export.open import open_pipeline
from sd3_light.export.verify import ProofError, _compare, prove, weights_digest
from sd3_light.model.layers import new_transformer

CONFIG = SIZES["tiny2"].transformer_config()
TEXT = {"text_tokens": "padded", "uncond_text": "zero", "t5_max_length": 16}
WEIGHT = "transformer_blocks.0.attn.to_q.weight"
FILE = Path("transformer", "diffusion_pytorch_model.safetensors")
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def trained() -> State:
    """A denoiser's weights and buffers, live in float32; gates and output are zero before training, here they act."""
    return live_weights()


def live_weights() -> State:
    transformer = new_transformer(CONFIG, seed=7)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return dict(transformer.state_dict())


@pytest.fixture
def state(trained: State) -> State:
    return dict(trained)


def spec(base: Path, **keys: Any) -> ExportSpec:
    given = {"save_dtype": torch.float16, "shift": 3.0, "text": TEXT, "facts": {"weights": "ema", "step": 5}}
    return ExportSpec(base, CONFIG, **{**given, **keys})


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, demo_parts: Path, trained: State) -> Path:
    """One real export with its proof, in float16. Read only."""
    return write_folder(tmp_path_factory.mktemp("exports") / "step-5", trained, spec(demo_parts))


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the proof's process, for tests of everything else."""
    monkeypatch.setattr(folder_module, "prove", lambda *_: {})


# --- what is refused ---------------------------------------------------------------------------


def lose(state: State) -> State:
    del state[WEIGHT]
    return state


FAULTS: dict[str, tuple[Callable[[State], State], str]] = {
    "missing": (lose, f"missing {WEIGHT}"),
    "missing buffer": (
        lambda state: {name: tensor for name, tensor in state.items() if name != "pos_embed.pos_embed"},
        "missing pos_embed.pos_embed",
    ),
    "unexpected": (lambda state: state | {"lora.default.weight": torch.zeros(1)}, "unexpected lora.default.weight"),
    "prefixed": (
        lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
        r"missing pos_embed.* and \d+ more",
    ),
    "shape": (
        lambda state: state | {WEIGHT: torch.zeros(128, 64)},
        rf"{WEIGHT} has shape \[128, 64\], not \[128, 128\]",
    ),
    "meta": (
        lambda state: state | {WEIGHT: torch.empty(128, 128, device="meta")},
        rf"{WEIGHT} holds no data \(meta tensor\)",
    ),
    "empty": (lambda state: {}, r"missing pos_embed.* and \d+ more"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_are_not_the_models_are_named_and_nothing_is_replaced(
    tmp_path: Path, demo_parts: Path, state: State, unproven: None, fault: str
) -> None:
    spoil, message = FAULTS[fault]
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("an earlier export")
    with pytest.raises(ExportError, match=rf"nothing was saved: .*{message}"):
        write_folder(out, spoil(state), spec(demo_parts))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["precious"]


def test_what_cannot_be_proven_is_not_announced(
    tmp_path: Path, demo_parts: Path, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("an earlier export")

    def fail(folder: Path, *_: object) -> dict[str, Any]:
        assert (folder / "model_index.json").is_file(), "it is whole when it is looked at"
        raise ProofError("not the same")

    monkeypatch.setattr(folder_module, "prove", fail)
    with pytest.raises(ProofError):
        write_folder(out, state, spec(demo_parts))
    assert (out / "precious").is_file()
    assert os.listdir(tmp_path) == ["out"], "nothing half-written is left"


def test_a_whole_export_replaces_an_earlier_one(tmp_path: Path, demo_parts: Path, state: State, unproven: None) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "stale").touch()
    assert write_folder(out, state, spec(demo_parts)) == out
    assert (out / "model_index.json").is_file()
    assert not (out / "stale").exists()


# --- what is written ---------------------------------------------------------------------------


def test_the_copy_is_cast_and_the_live_weights_are_untouched(demo_parts: Path, state: State) -> None:
    before = {name: tensor.clone() for name, tensor in state.items()}
    copy = checked_copy(state, spec(demo_parts))
    assert set(copy) == set(state)
    assert all(tensor.dtype == torch.float16 for tensor in copy.values())
    assert not {tensor.data_ptr() for tensor in copy.values()} & {tensor.data_ptr() for tensor in state.values()}
    for name, tensor in state.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])


def test_even_in_their_own_type_the_weights_are_copied(demo_parts: Path, state: State) -> None:
    copy = checked_copy(state, spec(demo_parts, save_dtype=torch.float32))
    copy[WEIGHT].zero_()
    assert state[WEIGHT].abs().sum() > 0


def test_a_float16_export_leaves_the_live_weights_alone(exported: Path, trained: State) -> None:
    saved = load_file(exported / FILE)
    assert set(saved) == set(trained), "buffers included"
    assert all(tensor.dtype == torch.float16 for tensor in saved.values())
    assert all(torch.equal(saved[name], trained[name].half()) for name in trained)
    assert all(tensor.dtype == torch.float32 for tensor in trained.values())
    fresh = live_weights()
    assert all(torch.equal(trained[name], fresh[name]) for name in trained)


def test_the_proof_is_on_record(exported: Path, trained: State) -> None:
    proof = json.loads((exported / "proof.json").read_text())
    assert proof["tensors"] == len(trained)
    assert proof["max_difference"] <= 1e-5
    assert proof["loaded_by"].startswith("diffusers 0.")
    assert proof["weights_sha256"] == weights_digest({name: tensor.half() for name, tensor in trained.items()})


def test_stock_diffusers_loads_it(exported: Path, trained: State) -> None:
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(exported, dtype=torch.float32, local_files_only=True)
    loaded = pipe.transformer.state_dict()
    assert all(torch.equal(loaded[name], trained[name].half().float()) for name in trained)
    assert pipe.transformer.config.num_layers == 2
    assert pipe.scheduler.config.shift == 3.0


def test_frozen_parts_are_linked_not_repeated(exported: Path, demo_parts: Path) -> None:
    weights = [path for part in FROZEN for path in (demo_parts / part).iterdir()]
    assert len(weights) > 10
    for path in weights:
        assert (exported / path.relative_to(demo_parts)).samefile(path)


def test_where_links_are_impossible_parts_are_copied(
    tmp_path: Path, demo_parts: Path, state: State, unproven: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", cannot)
    out = write_folder(tmp_path / "out", state, spec(demo_parts))
    one, two = out / "vae" / "config.json", demo_parts / "vae" / "config.json"
    assert not one.samefile(two)
    assert one.read_bytes() == two.read_bytes()


def test_the_folder_says_how_its_text_was_shown(exported: Path) -> None:
    facts = read_facts(exported)
    assert facts["text"] == TEXT
    assert (facts["weights"], facts["step"]) == ("ema", 5)
    card = (exported / "README.md").read_text()
    assert "max_sequence_length=16" in card
    assert "negative_prompt_embeds" in card, "zeros are not what stock guidance uses: the card says so"
    assert "real text tokens" not in card
    _, policy = open_pipeline(exported, torch.device("cpu"))
    assert (policy.t5_max_length, policy.uncond_text) == (16, "zero")


def test_the_card_says_that_the_stock_call_pads_real_tokens() -> None:
    card = model_card(CONFIG, {"text": {**TEXT, "text_tokens": "real"}})
    assert "is not the model that was trained" in card
    assert "negative_prompt_embeds" in card


def test_a_large_denoiser_is_cut_into_files(tmp_path: Path, demo_parts: Path, state: State, unproven: None) -> None:
    out = write_folder(tmp_path / "out", state, spec(demo_parts, max_shard_size="2MB"))
    files = sorted(path.name for path in (out / "transformer").glob("*.safetensors"))
    assert len(files) > 1
    assert sum(len(load_file(out / "transformer" / name)) for name in files) == len(state)


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no diffusers folder"):
        open_pipeline(tmp_path, torch.device("cpu"))


# --- the proof ---------------------------------------------------------------------------------


def one_weight(folder: Path) -> None:
    """The last bit of one number of one weight."""
    saved = load_file(folder / FILE)
    saved[WEIGHT].view(torch.int16)[3, 5] ^= 1
    save_file(saved, folder / FILE, {"format": "pt"})


def one_layer_more(folder: Path) -> None:
    """An earlier program's config said 24 layers for the weights of 15."""
    path = folder / "transformer" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_layers": 3}))


TAMPERED: list[tuple[Callable[[Path], None], str]] = [
    (one_weight, rf"reloaded weights differ in value: \['{WEIGHT}'\]"),
    (one_layer_more, "stock diffusers does not load .*transformer_blocks"),
]


@pytest.mark.parametrize(("tamper", "message"), TAMPERED, ids=[tamper.__name__ for tamper, _ in TAMPERED])
def test_a_folder_tampered_with_is_not_proven(
    tmp_path: Path, exported: Path, trained: State, tamper: Callable[[Path], None], message: str
) -> None:
    copy = Path(shutil.copytree(exported, tmp_path / "copy"))
    tamper(copy)
    with pytest.raises(ProofError, match=message):
        prove(copy, CONFIG, {name: tensor.half() for name, tensor in trained.items()})


def test_names_and_outputs_are_compared_too() -> None:
    weights = {"a": torch.ones(2), "b": torch.ones(2)}
    reloaded = {f"w/{name}": tensor for name, tensor in weights.items()}
    output = torch.full((3,), 2.0)
    assert _compare(reloaded, weights, output, output) == 0.0
    with pytest.raises(ProofError, match=r"differ in \['b'\]"):
        _compare({"w/a": weights["a"]}, weights, output, output)
    for other in (output + 1e-3, torch.full((3,), float("nan"))):
        with pytest.raises(ProofError, match="output differs by"):
            _compare(reloaded, weights, other, output)


def test_the_digest_sees_names_types_and_bits() -> None:
    weights = {"a": torch.zeros(2), "b": torch.ones(2)}
    digests = {
        weights_digest(weights),
        weights_digest({"a": torch.ones(2), "b": torch.zeros(2)}),
        weights_digest({name: tensor.half() for name, tensor in weights.items()}),
        weights_digest({"a": torch.zeros(2, 1), "b": torch.ones(2)}),
    }
    assert len(digests) == 4
    assert weights_digest(dict(reversed(weights.items()))) in digests
