"""Routing, LayerSync and position crops against plain loops over single samples and tokens."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.config import SIZES
from sd3_light.config.schema_blocks import BlockPair, TokenRoute
from sd3_light.families.sd3.between_blocks import BetweenBlocks, BetweenOptions
from sd3_light.families.sd3.fast.forward import FastDenoiser
from sd3_light.families.sd3.layers import build_layers, embed_patches, run_layers
from tests.cases import combinations
from tests.tiny_sd3 import perturbed

KEPT = torch.tensor([[0, 2, 5], [1, 3, 4]], dtype=torch.int32)
ROUTE = TokenRoute(0.5, 2, 3)
LENGTHS = [4, 9]
PAIRS = [None, (1, 2), (2, 3), (2, 4), (1, 4)]
"""No pair, one block before the route, both in it, one after it, and around it."""
Run = Callable[[SD3Transformer2DModel, BetweenBlocks | None, list[int] | None], Tensor]


def model() -> SD3Transformer2DModel:
    return perturbed({**SIZES["tiny3"].transformer_config(), "num_layers": 5})


def features() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((2, 16, 4, 6), (2, 9, 256), (2, 224))
    noisy, prompt, pooled = (torch.randn(*shape, generator=generator) for shape in shapes)
    return [noisy, torch.tensor([300.0, 800.0]), prompt, pooled]


def distance(early: Tensor, late: Tensor) -> Tensor:
    return ((early - late) ** 2).flatten(1).mean(1)


def run_stock(transformer: SD3Transformer2DModel, between: BetweenBlocks | None, lengths: list[int] | None) -> Tensor:
    inputs = [*features(), *([] if lengths is None else [torch.tensor(lengths)])]
    return run_layers(build_layers(transformer, real_text=lengths is not None), inputs, between=between)[0]


def run_fast(transformer: SD3Transformer2DModel, between: BetweenBlocks | None, lengths: list[int] | None) -> Tensor:
    return FastDenoiser(transformer, torch.float32).with_text(features(), lengths, None, between)[0]


def plain_loop(
    transformer: Any, pair: tuple[int, int] | None, lengths: list[int] | None
) -> tuple[Tensor, list[Tensor]]:
    """Run one sample at a time through the stock blocks, with lists of tokens; return patches and distances."""
    patches, distances = [], []
    for at, own in enumerate(KEPT.tolist()):
        noisy, times, prompt, pooled = (part[at : at + 1] for part in features())
        count = prompt.shape[1] if lengths is None else lengths[at]
        text = transformer.context_embedder(prompt[:, :count])
        time = transformer.time_text_embed(times, pooled)
        tokens = dict(enumerate(transformer.pos_embed(noisy)[0]))
        after: dict[int, dict[int, Tensor]] = {}
        for number, block in enumerate(transformer.transformer_blocks, start=1):
            running = own if 2 <= number <= 3 else list(tokens)
            text, image = block(
                hidden_states=torch.stack([tokens[name] for name in running])[None],
                encoder_hidden_states=text,
                temb=time,
                joint_attention_kwargs=None,
            )
            tokens = {**tokens, **dict(zip(running, image[0], strict=True))}
            after[number] = {name: tokens[name] for name in (own if number == 2 else tokens)}
        whole = torch.stack([tokens[name] for name in sorted(tokens)])[None]
        patches.append(transformer.proj_out(transformer.norm_out(whole, time)))
        if pair is not None:
            early, late = (after[number] for number in pair)
            both = sorted(set(early) & set(late))
            errors = [((early[name] - late[name].detach()) ** 2).mean() for name in both]
            distances.append(torch.stack(errors).mean())
    return torch.cat(patches), distances


Result = tuple[Tensor, Tensor, dict[str, Tensor | None]]


def result_of(transformer: SD3Transformer2DModel, patches: Tensor, compared: Tensor) -> Result:
    """Return patches, distances and the gradients of every weight."""
    weight = torch.randn(patches.shape, generator=torch.Generator().manual_seed(3))
    ((patches * weight).mean() + 0.3 * compared.sum()).backward()
    grads = {name: parameter.grad for name, parameter in transformer.named_parameters()}
    return patches.detach(), compared.detach(), grads


@cache
def expected_of(pair: tuple[int, int] | None, lengths: tuple[int, ...] | None) -> Result:
    transformer = model()
    patches, distances = plain_loop(transformer, pair, None if lengths is None else list(lengths))
    return result_of(transformer, patches, torch.stack(distances) if distances else torch.zeros(2))


@pytest.mark.parametrize("run", [run_stock, run_fast], ids=["stock", "fast"])
@pytest.mark.parametrize(
    ("pair", "lengths"),
    combinations(PAIRS, (None, LENGTHS), fast=[((2, 4), None), *((pair, LENGTHS) for pair in PAIRS)]),
)
def test_routes_and_pairs_equal_a_plain_loop(run: Run, pair: tuple[int, int] | None, lengths: list[int] | None) -> None:
    transformer = model()
    between = BetweenBlocks(BetweenOptions(ROUTE, None if pair is None else BlockPair(*pair)), KEPT, distance)
    patches = run(transformer, between, lengths)
    actual, distances_actual, grads = result_of(
        transformer, patches, torch.zeros(2) if between.compared is None else between.compared
    )
    expected, distances_expected, grads_expected = expected_of(pair, None if lengths is None else tuple(lengths))
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(distances_actual, distances_expected, rtol=1e-5, atol=1e-7)
    assert (pair is None) == (not distances_actual.any())
    for name, gradient in grads_expected.items():
        assert grads[name] is not None, name
        worst = float((grads[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-6))
        assert worst < 2e-4, f"{name}: {worst}"


@pytest.mark.parametrize("run", [run_stock, run_fast], ids=["stock", "fast"])
def test_without_kept_tokens_nothing_is_routed(run: Run) -> None:
    transformer = model()
    between = BetweenBlocks(BetweenOptions(ROUTE, None), None, distance)
    assert between.num_kept is None
    assert torch.equal(run(transformer, between, None), run(transformer, None, None))
    routed = run(transformer, BetweenBlocks(BetweenOptions(ROUTE, None), KEPT, distance), None)
    assert not torch.allclose(routed, run(transformer, None, None), rtol=1e-3)


@pytest.mark.parametrize("checkpointing", [True, 0.5, "selective"])
def test_checkpointing_changes_no_gradient(checkpointing: Any) -> None:
    gradients = []
    for choice in (False, checkpointing):
        transformer = model()
        between = BetweenBlocks(BetweenOptions(ROUTE, BlockPair(1, 3)), KEPT, distance)
        patches = run_layers(build_layers(transformer), features(), choice, between)[0]
        (patches.mean() + between.compared.sum()).backward()
        gradients.append({name: parameter.grad for name, parameter in transformer.named_parameters()})
    plain, checked = gradients
    assert all(torch.equal(plain[name], checked[name]) for name in plain)  # type: ignore[arg-type]


def test_crops_equal_a_plain_loop_and_the_centre_is_that_of_stock() -> None:
    embed, noisy = model().pos_embed, features()[0]
    corners = torch.tensor([[3, 0], [14, 9]], dtype=torch.int32)
    actual = embed_patches(embed, noisy, corners)
    side = embed.pos_embed_max_size
    table = embed.pos_embed.view(side, side, -1)
    for at, (top, left) in enumerate(corners.tolist()):
        patches = embed.proj(noisy[at : at + 1])[0]
        for row in range(2):
            for column in range(3):
                expected = patches[:, row, column] + table[top + row, left + column]
                torch.testing.assert_close(actual[at, 3 * row + column], expected, rtol=1e-6, atol=1e-6)
    side = embed.pos_embed_max_size
    centre = torch.tensor([[(side - 2) // 2, (side - 3) // 2]] * 2)
    assert torch.equal(embed_patches(embed, noisy, centre), embed(noisy))
    assert torch.equal(embed_patches(embed, noisy), embed(noisy))
