"""Weight decay and Muon's matrices, in the real denoisers of several families: every parameter is in one group."""

from functools import cache
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import nn

from sd3_light.config import SIZES, AdapterConfig
from sd3_light.model.adapter_layers import add_adapter
from sd3_light.optim.groups import WeightKinds
from tests.families import DENOISERS, make_denoiser

# of SD3 the smallest, the main one, one without qk-norm, and one whose first blocks attend twice
SD3 = ["tiny2", "sd3_light", "sd3_medium", "sd3.5_medium"]
BLOCKS = ("transformer_blocks", "single_transformer_blocks", "blocks", "layers", "noise_refiner", "context_refiner")
HEADS = ("final_layer", "norm_out", "proj_out")


@cache
def denoiser_of(name: str) -> Any:
    with torch.device("meta"):
        return SD3Transformer2DModel(**SIZES[name].transformer_config()) if name in SIZES else make_denoiser(name)


@pytest.fixture(params=[*SD3, *DENOISERS])
def denoiser(request: pytest.FixtureRequest) -> Any:
    return denoiser_of(request.param)


def by_kind(denoiser: nn.Module) -> dict[str, str]:
    """Name -> kind of a parameter, written down from the families' sources."""
    kinds = {}
    for path, module in denoiser.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            top, product = path.split(".")[0], isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d)
            kind = "block" if top in BLOCKS else "head" if top in HEADS else "embedding"
            kinds[f"{path}.{name}".strip(".")] = kind if product and name == "weight" else "other"
    return kinds


def test_matrices_decay_and_those_of_blocks_are_for_muon(denoiser: Any) -> None:
    """Norms, biases, tables and embeddings do not decay; block matrices are the linear layers of all blocks."""
    expected = by_kind(denoiser)
    assert {"block", "embedding", "other"} <= set(expected.values())
    for model in (denoiser, nn.ModuleDict({"pipe": nn.ModuleDict({"dit": denoiser})})):  # alone, and below a module
        kinds = WeightKinds(model)
        for name, weight in denoiser.named_parameters():
            assert kinds.decays(weight) == (expected[name] in ("block", "head")), name
            assert kinds.is_block_matrix(weight) == (expected[name] == "block" and weight.dim() == 2), name


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_factors_of_an_adapter_are_like_their_layer(kind: Any) -> None:
    denoiser = make_denoiser("flux")
    targets = ("attn.to_q", "proj_mlp", "x_embedder", "norm_out.linear")
    add_adapter(denoiser, AdapterConfig(type=kind, rank=2, target_modules=targets), seed=0)
    kinds = WeightKinds(denoiser)
    trained = {name: weight for name, weight in denoiser.named_parameters() if weight.requires_grad}
    for name, weight in trained.items():
        assert kinds.is_block_matrix(weight) == ("blocks." in name), name
        assert kinds.decays(weight) == ("x_embedder" not in name), name
    assert any("single_transformer_blocks" in name for name in trained)


def test_layers_without_blocks_decay_unless_they_are_embeddings_and_empty_groups_are_left_out() -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    kinds = WeightKinds(model)
    decaying = {name for name, weight in model.named_parameters() if kinds.decays(weight)}
    assert decaying == {"1.weight", "2.in_proj_weight", "2.out_proj.weight"}
    assert not any(kinds.is_block_matrix(weight) for weight in model.parameters())
    # an empty group is left out
    denoiser = denoiser_of("tiny2")
    (group,) = WeightKinds(denoiser).groups(dict(denoiser.named_parameters()), 0.0)
    assert len(group["params"]) == len(list(denoiser.parameters()))
    layer = nn.Linear(2, 3)
    groups = WeightKinds(layer).groups({"bias": layer.bias}, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.0]


FLUX = ("flux", "flux_kontext")
QWEN = ("qwen_image", "qwen_image_edit", "qwen_image_edit_plus")
MODULATIONS = {
    "tiny2": {"norm1.linear": {6}, "norm1_context.linear": {6, 2}},
    "sd3.5_medium": {"norm1.linear": {9, 6}, "norm1_context.linear": {6, 2}},
    **{key: {"norm1.linear": {6}, "norm1_context.linear": {6}, "norm.linear": {3}} for key in FLUX},
    **{key: {"img_mod.1": {6}, "txt_mod.1": {6}} for key in QWEN},
    "z_image": {"adaLN_modulation.0": {4}},
    "prx": {"modulation.lin": {6}},
}
"""Fused modulations inside blocks and their parts, from the families' sources; the others have none."""


@pytest.mark.parametrize("name", ["tiny2", "sd3.5_medium", *DENOISERS])
def test_fused_modulations_are_known_and_parameters_in_one_group(name: str) -> None:
    denoiser = denoiser_of(name)
    kinds, parts, aliases = WeightKinds(denoiser), {}, []
    for path, weight in denoiser.named_parameters():
        if kinds.modulation_parts(weight) > 1:
            layer = path.removesuffix(".weight").split(".", 2)[2]
            parts.setdefault(layer, set()).add(kinds.modulation_parts(weight))
            assert weight.shape[0] == kinds.modulation_parts(weight) * weight.shape[1]
        aliases.append(nn.Parameter(torch.empty_like(weight)))  # of a weight that is in host memory
        kinds.add_alias(aliases[-1], weight)
        for of in (kinds.modulation_parts, kinds.decays, kinds.is_block_matrix):
            assert of(aliases[-1]) == of(weight), path
    assert parts == MODULATIONS.get(name, {})
    # every parameter is in one group with its decay
    groups = kinds.groups(dict(denoiser.named_parameters()), 0.3)
    members = [id(weight) for group in groups for weight in group["params"]]
    assert len(members) == len(set(members))
    assert set(members) == {id(weight) for weight in denoiser.parameters()}
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.3]
    for group in groups:
        for weight in group["params"]:
            assert group["weight_decay"] == (0.3 if kinds.decays(weight) else 0.0)
