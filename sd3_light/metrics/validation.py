"""The validation loss: fixed noise at fixed quantiles of t, one number each, the same whenever it is computed."""

from collections.abc import Callable, Iterable
from typing import Any

QUANTILES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def validate(
    batches: Iterable[Any], prepare: Callable[[Any, float], Any], evaluate: Callable[[Any], dict[str, float]]
) -> dict[str, float]:
    """``flow@Q`` for every quantile and their mean ``flow``, over all batches (equally large ones)."""
    totals = dict.fromkeys(QUANTILES, 0.0)
    count = 0
    for batch in batches:
        count += 1
        for quantile in QUANTILES:
            totals[quantile] += evaluate(prepare(batch, quantile))["flow"]
    assert count, "an evaluation set has at least one batch"
    losses = {f"flow@{quantile}": total / count for quantile, total in totals.items()}
    return {**losses, "flow": sum(losses.values()) / len(losses)}
