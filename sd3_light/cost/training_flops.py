"""FLOPs of a training sample and of a step, from the cost of a forward pass."""

from collections.abc import Mapping

from sd3_light.config.base import Checkpointing
from sd3_light.config.schema_objective import ObjectiveConfig
from sd3_light.config.schema_reward import RewardConfig
from sd3_light.core.cost import Cost, Tokens
from sd3_light.cost.amount import Amount


def training_flops(
    cost: Cost,
    tokens: Tokens,
    checkpointing: Checkpointing = False,
    adapter: bool = False,
    terms: ObjectiveConfig | None = None,
) -> Amount:
    """Return the FLOPs of one training sample: the backward pass costs two forward passes, checkpointing one more.

    With an ``adapter`` the frozen weights' gradients are not computed: one forward pass less. The adapter itself, a
    few percent at usual ranks, is not counted. The ``terms`` of an objective may take several passes, and those of a
    teacher.
    """
    again = checkpointing if isinstance(checkpointing, float) else int(checkpointing in (True, "host"))
    passes = 3 + again - adapter
    forward = cost.forward_flops(tokens)
    value = round(passes * forward) - cost.input_flops(tokens)
    formula = f"{passes}·({cost.flops_formula}) - inputs' gradients"
    if terms is not None and terms.alignment is not None:
        value += 6 * terms.alignment.projector_weights(cost.width) * tokens.image
        formula += " + 6·projector's weights·N"
    if terms is None or not terms.teacher_passes:
        return Amount(value, formula)
    text = f"{terms.passes} x ({formula}) and {terms.teacher_passes} forward passes of the teacher"
    taught = Amount(terms.passes * value + terms.teacher_passes * forward, text)
    return Amount(taught.value + forward, f"{taught.formula}; one of the start") if terms.keeps_start else taught


def drawing_flops(cost: Cost, tokens: Tokens, table: RewardConfig) -> Amount:
    """Return the FLOPs per step of drawing the images of [reward], without their VAE and their score."""
    value = table.images * table.steps * cost.forward_flops(tokens) / table.every_n_steps
    return Amount(
        round(value), f"{table.images} images·{table.steps} sampler steps / {table.every_n_steps} steps·one pass"
    )


def step_flops(
    cost: Cost, samples: Mapping[Tokens, int], adapter: bool = False, terms: ObjectiveConfig | None = None
) -> int:
    """Return the FLOPs that a step needs, for utilisation; ``samples`` counts those with equal numbers of tokens.

    Recomputation that saves memory, and padding that `text_tokens = "real"` masks, are not counted.
    """
    each = {tokens: training_flops(cost, tokens, adapter=adapter, terms=terms).value for tokens in samples}
    return sum(count * each[tokens] for tokens, count in samples.items())
