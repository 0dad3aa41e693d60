"""Running averages: float32, closed forms, and exact restoring of the weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sd3_light.config import EmaConfig
from sd3_light.optim.ema import MAIN_TRACK, Averages, Track
from sd3_light.optim.power_function import gamma_from_sigma_rel


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Two tensors and an empty one, as of a weight whose rows are all on another rank."""
    generator = torch.Generator().manual_seed(0)
    values = {"a": torch.randn(4, 3, generator=generator), "b": torch.randn(5, generator=generator)}
    return {**{name: value.to(dtype) for name, value in values.items()}, "none": torch.empty(0, 7, dtype=dtype)}


def averages(live: Any, decay: float = 0.9, update_every: int = 1, track: tuple[Any, ...] = ()) -> Averages:
    return Averages(live, EmaConfig(enable=True, decay=decay, update_every=update_every, track=track))


def walk(averages: Averages, live: dict[str, Tensor], steps: int) -> dict[str, list[np.ndarray]]:
    """Take random steps; return the weights' values in float64, including the start."""
    generator = torch.Generator().manual_seed(1)
    history = {name: [weight.double().numpy().copy()] for name, weight in live.items()}
    for step in range(1, steps + 1):
        for name, weight in live.items():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
            history[name].append(weight.double().numpy().copy())
        averages.update(live, step)
    return history


def assert_average(track: Track, history: dict[str, list[np.ndarray]], profile: Callable[[int], float]) -> None:
    """The shadow equals the explicit float64 sum over the history."""
    for name, values in history.items():
        expected = sum(profile(step) * value for step, value in enumerate(values))
        np.testing.assert_allclose(track.shadow[name].numpy(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("decay", [0.3, 0.9])
@pytest.mark.parametrize("every", [1, 4])
def test_constant_decay_in_closed_form(every: int, decay: float) -> None:
    live = weights()
    tracks = averages(live, decay, update_every=every)
    history = walk(tracks, live, 22)
    decays = [min(decay, (1 + done) / (10 + done)) for done in range(22 // every)]

    def profile(step: int) -> float:
        number = step // every - 1
        if step and step % every:
            return 0.0
        return float(np.prod(decays[number + 1 :]) * (1 - decays[number] if step else 1))

    assert sum(map(profile, range(23))) == pytest.approx(1)
    assert_average(tracks.tracks[MAIN_TRACK], history, profile)


def test_a_resumed_average_continues_the_ramp() -> None:
    """The number of updates follows from the step, so a checkpoint needs no counter, and those without ramp resume."""
    whole, resumed = weights(), weights()
    tracks = averages(whole, 0.9, update_every=3)
    walk(tracks, whole, 20)
    before = averages(resumed, 0.9, update_every=3)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 21):
        if step == 8:
            after = averages(resumed, 0.9, update_every=3)
            for name, shadow in before.tracks[MAIN_TRACK].shadow.items():
                after.tracks[MAIN_TRACK].shadow[name].copy_(shadow)
            before = after
        for weight in resumed.values():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
        before.update(resumed, step)
    for name, shadow in tracks.tracks[MAIN_TRACK].shadow.items():
        assert torch.equal(shadow, before.tracks[MAIN_TRACK].shadow[name])


def test_a_bfloat16_model_has_a_float32_average_that_moves() -> None:
    """A bfloat16 average with decay 0.9999 would not move at all. The ramp is over at step 89,990."""
    live = weights(torch.bfloat16)
    tracks = averages(live, decay=0.9999)
    shadow = tracks.tracks[MAIN_TRACK].shadow
    assert {tensor.dtype for tensor in shadow.values()} == {torch.float32}
    start = shadow["a"].clone()
    live["a"] += 1
    step_sized = (live["a"].float() - start) * 1e-4
    for step in range(90001, 90101):
        tracks.update(live, step)
    torch.testing.assert_close(shadow["a"] - start, 100 * step_sized, rtol=0.02, atol=1e-5)


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("width", [0.03, 0.1, 0.25])
def test_a_power_function_in_closed_form(every: int, width: float) -> None:
    """Each value weighs the profile's integral over the steps it represents; the start has weight 0."""
    live = weights()
    tracks = averages(live, track=({"name": "p", "power_width": width, "update_every": every},))
    history = walk(tracks, live, 63)
    exponent, last = gamma_from_sigma_rel(width) + 1, 63 - 63 % every

    def profile(step: int) -> float:
        if step == 0 or step % every:
            return 0.0
        return float((step / last) ** exponent - ((step - every) / last) ** exponent)

    assert sum(map(profile, range(64))) == pytest.approx(1, abs=1e-12)
    assert_average(tracks.tracks["p"], history, profile)


THREE = (
    {"name": "slow", "decay": 0.99},
    {"name": "often", "decay": 0.7, "update_every": 1},
    {"name": "power", "power_width": 0.1},
)


def test_tracks_are_independent() -> None:
    live = weights()
    together = averages(live, 0.9, 3, THREE)
    walk(together, live, 20)
    assert list(together.tracks) == [MAIN_TRACK, "slow", "often", "power"]
    for index, (name, every) in enumerate((("slow", 3), ("often", 1), ("power", 3))):
        live = weights()
        alone = averages(live, 0.1, 7, ({**THREE[index], "update_every": every},))
        walk(alone, live, 20)
        assert torch.equal(alone.tracks[name].shadow["a"], together.tracks[name].shadow["a"]), name


def test_decays_for_the_log() -> None:
    tracks = averages(weights(), 0.9, 100, THREE)
    exponent = gamma_from_sigma_rel(0.1) + 1
    power = pytest.approx(0.9**exponent)
    assert tracks.decays(1000) == {MAIN_TRACK: 10 / 19, "slow": 10 / 19, "often": 0.7, "power": power}
    assert [tracks.decays(step)[MAIN_TRACK] for step in (0, 100, 200, 299, 8100)] == [0.1, 0.1, 2 / 11, 2 / 11, 81 / 90]
    assert tracks.decays(10**6)["slow"] == 0.99
    assert tracks.decays(100)["power"] == tracks.decays(7)["power"] == tracks.decays(0)["power"] == 0.0
    none = Averages(weights(), EmaConfig(enable=False))
    none.update(weights(), 100)
    assert (none.tracks, none.decays(100)) == ({}, {})


def test_tracks_start_as_copies_and_an_update_changes_no_parameter() -> None:
    live = weights()
    tracks = averages(live, track=THREE)
    start = live["a"].clone()
    assert all(torch.equal(track.shadow["a"], start) for track in tracks.tracks.values())
    live["a"].zero_()
    tracks.tracks["slow"].shadow["a"].fill_(7)
    assert all(torch.equal(track.shadow["a"], start) for name, track in tracks.tracks.items() if name != "slow")
    weight = {"a": nn.Parameter(torch.ones(3))}
    average = averages(weight, 0.5)
    with torch.no_grad():
        weight["a"] += 2
    average.update(weight, 100)
    shadow = average.tracks[MAIN_TRACK].shadow["a"]
    assert torch.equal(weight["a"].detach(), torch.full((3,), 3.0))
    assert torch.equal(shadow, torch.full((3,), 2.0))
    assert not shadow.requires_grad


def test_in_place_of_swaps_and_restores_bit_for_bit() -> None:
    """Also after changes and an exception."""
    live = {name: nn.Parameter(weight) for name, weight in weights().items()}
    tracks = averages(live, 0.9, track=THREE)
    for factor, track in enumerate(tracks.tracks.values(), start=2):
        for shadow in track.shadow.values():
            shadow.mul_(1.1**factor)
    before = {name: weight.detach().clone() for name, weight in live.items()}
    for name in (MAIN_TRACK, "often"):
        with tracks.in_place_of(name, live):
            assert all(torch.equal(live[key].detach(), tracks.tracks[name].shadow[key]) for key in live)
        assert all(torch.equal(live[key].detach(), before[key]) for key in live)
    shadow = {name: tensor.clone() for name, tensor in tracks.tracks[MAIN_TRACK].shadow.items()}

    def change_and_fail() -> None:
        with tracks.in_place_of(MAIN_TRACK, live), torch.no_grad():
            live["a"].zero_()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        change_and_fail()
    assert all(torch.equal(live[name].detach(), before[name]) for name in live)
    assert all(torch.equal(tracks.tracks[MAIN_TRACK].shadow[name], shadow[name]) for name in shadow)
