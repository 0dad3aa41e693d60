"""Running averages: float32, closed form, in and out of the model without a trace."""

import pytest
import torch
from torch import Tensor, nn

from sd3_light.optim.ema import Ema


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(4, 3, generator=generator).to(dtype), "b": torch.randn(5, generator=generator).to(dtype)}


def test_closed_form_after_many_updates() -> None:
    live = weights()
    ema = Ema(live, decay=0.9, update_every=1)
    history = [{name: weight.double().clone() for name, weight in live.items()}]
    for step in range(1, 21):
        for weight in live.values():
            weight.add_(0.1 * step)
        history.append({name: weight.double().clone() for name, weight in live.items()})
        ema.update(live, step)
    for name in live:
        expected = 0.9**20 * history[0][name]
        for number in range(1, 21):
            expected += 0.1 * 0.9 ** (20 - number) * history[number][name]
        torch.testing.assert_close(ema.shadow[name].double(), expected, rtol=1e-5, atol=1e-5)


def test_it_moves_only_when_it_is_its_turn() -> None:
    live = weights()
    ema = Ema(live, decay=0.5, update_every=3)
    start = ema.shadow["a"].clone()
    live["a"] += 1
    moved = []
    for step in range(1, 10):
        before = ema.shadow["a"].clone()
        ema.update(live, step)
        moved.append(not torch.equal(before, ema.shadow["a"]))
    assert moved == [step % 3 == 0 for step in range(1, 10)]
    torch.testing.assert_close(ema.shadow["a"], start + 1 - 0.5**3)


def test_a_bfloat16_model_has_a_float32_average_that_moves() -> None:
    """A bfloat16 average with decay 0.9999 does not move at all."""
    live = weights(torch.bfloat16)
    ema = Ema(live, decay=0.9999, update_every=1)
    assert {shadow.dtype for shadow in ema.shadow.values()} == {torch.float32}
    start = ema.shadow["a"].clone()
    live["a"] += 1
    step_sized = (live["a"].float() - start) * 1e-4
    for step in range(1, 101):
        ema.update(live, step)
    torch.testing.assert_close(ema.shadow["a"] - start, 100 * step_sized, rtol=0.02, atol=1e-5)


def test_it_starts_as_a_copy_and_shares_nothing() -> None:
    live = weights()
    ema = Ema(live, 0.9, 1)
    assert torch.equal(ema.shadow["a"], live["a"])
    kept = ema.shadow["a"].clone()
    live["a"].zero_()
    assert torch.equal(ema.shadow["a"], kept)


def test_updating_leaves_the_weights_and_takes_parameters_that_learn() -> None:
    live = {"a": nn.Parameter(torch.ones(3))}
    ema = Ema(live, 0.5, 1)
    with torch.no_grad():
        live["a"] += 2
    ema.update(live, 1)
    assert torch.equal(live["a"].detach(), torch.full((3,), 3.0))
    assert torch.equal(ema.shadow["a"], torch.full((3,), 2.0))
    assert not ema.shadow["a"].requires_grad


def shifted() -> tuple[dict[str, nn.Parameter], Ema, dict[str, Tensor]]:
    live = {name: nn.Parameter(weight) for name, weight in weights().items()}
    ema = Ema(live, 0.9, 1)
    for shadow in ema.shadow.values():
        shadow.mul_(1.7)
    return live, ema, {name: weight.detach().clone() for name, weight in live.items()}


def test_in_place_of_shows_the_average_and_restores_bit_for_bit() -> None:
    live, ema, before = shifted()
    with ema.in_place_of(live):
        assert all(torch.equal(live[name].detach(), ema.shadow[name]) for name in live)
    assert all(torch.equal(live[name].detach(), before[name]) for name in live)


def test_in_place_of_restores_after_an_exception() -> None:
    live, ema, before = shifted()
    shadow = {name: tensor.clone() for name, tensor in ema.shadow.items()}
    with pytest.raises(KeyboardInterrupt), ema.in_place_of(live):
        raise KeyboardInterrupt
    assert all(torch.equal(live[name].detach(), before[name]) for name in live)
    assert all(torch.equal(ema.shadow[name], shadow[name]) for name in shadow)


def test_what_is_done_to_the_weights_inside_does_not_reach_the_average() -> None:
    live, ema, before = shifted()
    shadow = ema.shadow["a"].clone()
    with ema.in_place_of(live), torch.no_grad():
        live["a"].zero_()
    assert torch.equal(ema.shadow["a"], shadow)
    assert torch.equal(live["a"].detach(), before["a"])
