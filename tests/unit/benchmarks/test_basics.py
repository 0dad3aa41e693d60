"""What benchmarks print and choose by: means with their errors, and the steps of a run that fit into minutes."""

from types import SimpleNamespace


def test_a_mean_has_an_error_over_seeds(scripts: SimpleNamespace) -> None:
    assert scripts.basics.spread([0.5, 0.7], 2) == "0.60 ±0.10"
    assert scripts.basics.spread([1.0], 3) == "1.000"
    assert scripts.basics.percent([0.5, 0.7], 100) == "60.0 ± 10.0"


def test_one_seed_has_the_error_of_a_share(scripts: SimpleNamespace) -> None:
    assert scripts.basics.percent([0.5], 100) == "50.0 ± 5.0"


def test_steps_are_chosen_by_the_time_of_a_step_without_the_start(scripts: SimpleNamespace) -> None:
    fit = scripts.basics.steps_that_fit
    assert fit(lambda steps: 5 + 0.5 * steps, (4, 20), 1.0) == 120
    assert fit(lambda steps: 5 + 0.5 * steps, (4, 20), 0.0) == 20, "those that were run"
