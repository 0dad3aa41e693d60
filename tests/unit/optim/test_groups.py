"""Which weights decay: every parameter in exactly one group."""

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import nn

from sd3_light.config import SIZES
from sd3_light.optim.groups import decays, parameter_groups


@pytest.fixture(scope="module")
def transformer() -> SD3Transformer2DModel:
    with torch.device("meta"):
        return SD3Transformer2DModel(**SIZES["tiny2"].transformer_config())


def test_every_parameter_is_in_exactly_one_group(transformer: SD3Transformer2DModel) -> None:
    groups = parameter_groups(transformer.named_parameters(), 0.01)
    members = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(members) == len(set(members))
    assert set(members) == {id(parameter) for parameter in transformer.parameters()}
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.01]


def test_matrices_of_the_blocks_decay_and_norms_biases_and_embeddings_do_not(
    transformer: SD3Transformer2DModel,
) -> None:
    by_name = {name: decays(name, parameter) for name, parameter in transformer.named_parameters()}
    block = "transformer_blocks.0."
    for name in ("attn.to_q.weight", "attn.add_k_proj.weight", "ff.net.0.proj.weight", "norm1.linear.weight"):
        assert by_name[block + name], name
    for name in ("attn.to_q.bias", "attn.norm_q.weight", "attn.norm_added_k.weight", "ff.net.2.bias"):
        assert not by_name[block + name], name
    for name in (
        "pos_embed.proj.weight",
        "time_text_embed.timestep_embedder.linear_1.weight",
        "time_text_embed.text_embedder.linear_2.weight",
        "context_embedder.weight",
        "proj_out.bias",
    ):
        assert not by_name[name], name
    assert by_name["proj_out.weight"]


def test_groups_carry_their_decay(transformer: SD3Transformer2DModel) -> None:
    names = {id(parameter): name for name, parameter in transformer.named_parameters()}
    for group in parameter_groups(transformer.named_parameters(), 0.3):
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.3 if decays(names[id(parameter)], parameter) else 0.0)


def test_no_decay_is_one_group(transformer: SD3Transformer2DModel) -> None:
    groups = parameter_groups(transformer.named_parameters(), 0.0)
    assert len(groups) == 1
    assert len(groups[0]["params"]) == len(list(transformer.parameters()))


def test_an_empty_group_is_left_out() -> None:
    only_bias = [("block.bias", nn.Parameter(torch.zeros(3)))]
    assert [group["weight_decay"] for group in parameter_groups(only_bias, 0.1)] == [0.0]
