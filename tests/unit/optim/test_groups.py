"""Weight decay by the real parameter names of several sizes: every parameter is in exactly one group."""

from functools import cache

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import nn

from sd3_light.config import SIZES
from sd3_light.optim.build import decays, is_block_matrix, parameter_groups

# the smallest, the main one, one without qk-norm, and one whose first blocks attend twice
USED = ["tiny2", "sd3_light", "sd3_medium", "sd3.5_medium"]


@cache
def transformer_of(size: str) -> SD3Transformer2DModel:
    with torch.device("meta"):
        return SD3Transformer2DModel(**SIZES[size].transformer_config())


@pytest.fixture(params=USED)
def transformer(request: pytest.FixtureRequest) -> SD3Transformer2DModel:
    return transformer_of(request.param)


def by_kind(transformer: SD3Transformer2DModel) -> dict[str, str]:
    """Name -> kind of a parameter, from its module and not from its name or shape."""
    kinds = {}
    for path, module in transformer.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            kind = "matrix" if isinstance(module, nn.Linear) and name == "weight" else "other"
            top = path.split(".")[0]
            kinds[f"{path}.{name}"] = (
                "embedding" if top in ("pos_embed", "time_text_embed", "context_embedder") else kind
            )
    return kinds


def test_matrices_decay_and_norms_biases_and_embeddings_do_not(transformer: SD3Transformer2DModel) -> None:
    kinds = by_kind(transformer)
    assert set(kinds.values()) == {"matrix", "embedding", "other"}
    for name, parameter in transformer.named_parameters():
        assert decays(name, parameter) == (kinds[name] == "matrix"), name


def test_block_matrices_are_the_matrices_of_blocks(transformer: SD3Transformer2DModel) -> None:
    kinds = by_kind(transformer)
    for name, parameter in transformer.named_parameters():
        inside = name.startswith("transformer_blocks.") and kinds[name] == "matrix"
        assert is_block_matrix(name, parameter) == inside, name
        assert decays(name, parameter) or not inside, "Muon's matrices decay"


@pytest.mark.parametrize(
    ("part", "decaying"),
    [("to_q.weight", True), ("to_out.0.weight", True), ("to_q.bias", False), ("norm_q.weight", False)],
)
def test_the_second_attention_of_sd35_is_treated_like_the_first(part: str, decaying: bool) -> None:
    named = dict(transformer_of("sd3.5_medium").named_parameters())
    for attention in ("attn", "attn2"):
        name = f"transformer_blocks.12.{attention}.{part}"
        assert decays(name, named[name]) == is_block_matrix(name, named[name]) == decaying


def test_every_parameter_is_in_one_group_with_its_decay(transformer: SD3Transformer2DModel) -> None:
    groups = parameter_groups(transformer.named_parameters(), 0.3)
    members = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(members) == len(set(members))
    names = {id(parameter): name for name, parameter in transformer.named_parameters()}
    assert set(members) == set(names)
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.3]
    for group in groups:
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.3 if decays(names[id(parameter)], parameter) else 0.0)


def test_no_decay_is_one_group() -> None:
    transformer = transformer_of("tiny2")
    groups = parameter_groups(transformer.named_parameters(), 0.0)
    assert len(groups) == 1
    assert len(groups[0]["params"]) == len(list(transformer.parameters()))


def test_an_empty_group_is_left_out() -> None:
    only_bias = [("block.bias", nn.Parameter(torch.zeros(3)))]
    assert [group["weight_decay"] for group in parameter_groups(only_bias, 0.1)] == [0.0]
