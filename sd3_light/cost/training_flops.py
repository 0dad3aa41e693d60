"""FLOPs of a training sample and of a step, from the cost of a forward pass."""

from collections.abc import Mapping

from sd3_light.config.base import Checkpointing
from sd3_light.core.cost import Cost, Tokens
from sd3_light.cost.amount import Amount


def training_flops(cost: Cost, tokens: Tokens, checkpointing: Checkpointing = False, adapter: bool = False) -> Amount:
    """Return the FLOPs of one training sample: the backward pass costs two forward passes, checkpointing one more.

    With an ``adapter`` the frozen weights' gradients are not computed: one forward pass less. The adapter itself, a
    few percent at usual ranks, is not counted.
    """
    passes = 3 + (checkpointing is True) - adapter
    value = passes * cost.forward_flops(tokens) - cost.input_flops(tokens)
    return Amount(value, f"{passes}·({cost.flops_formula}) - inputs' gradients")


def step_flops(cost: Cost, samples: Mapping[Tokens, int], adapter: bool = False) -> int:
    """Return the FLOPs that a step needs, for utilisation; ``samples`` counts those with equal numbers of tokens.

    Recomputation that saves memory, and padding that `text_tokens = "real"` masks, are not counted.
    """
    return sum(count * training_flops(cost, tokens, adapter=adapter).value for tokens, count in samples.items())
