"""Text dropout: one draw per encoder takes that encoder's tokens and its pooled vector away together."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from sd3_light.randomness import stream

ENCODERS = ("clip_l", "clip_g", "t5")


def draw_drops(seed: int, epoch: int, repeat: int, sample_id: int, probability: float) -> tuple[bool, ...]:
    """Which encoders one occurrence of a sample goes without; independent draws, one an encoder (law 1)."""
    draws = stream(seed, "text-dropout", epoch, repeat, sample_id).random(len(ENCODERS))
    return tuple(bool(draw < probability) for draw in draws)


def drop_text(
    texts: Mapping[str, Sequence[Tensor]],
    drops: Sequence[Sequence[bool]],
    uncond: Mapping[str, Tensor] | None,
    real: bool = False,
) -> dict[str, list[Tensor]]:
    """Texts, of each part a tensor a sample, with dropped encoders zeroed, tokens and pooled alike. A sample that lost
    all three carries ``uncond`` (the features of the empty caption), or zeros where that is None. Nothing is copied.

    Where tokens are ``real``, dropping T5 takes its tokens away, and dropping a CLIP leaves zeros in their place; a
    sample that lost all three has the tokens of ``uncond``, or is one token of zeros.
    """
    result: dict[str, list[Tensor]] = {}
    for name, values in texts.items():
        encoder, _, pooled = name.partition(".")
        column = ENCODERS.index(encoder)
        empty = None if uncond is None else uncond[name].to(values[0].dtype)
        nothing = values[0].new_zeros(())
        result[name] = []
        for own, dropped in zip(values, drops, strict=True):
            if not dropped[column]:
                result[name].append(own)
            elif empty is not None and all(dropped):
                result[name].append(empty)
            elif pooled or not real:
                result[name].append(nothing.expand(own.shape))
            else:
                rows = 0 if encoder == "t5" else 1 if all(dropped) else len(own)
                result[name].append(nothing.expand(rows, own.shape[-1]))
    return result
