"""What training does to the image tokens between blocks: route some of them past the middle blocks (TREAD), and
compare those of two blocks (LayerSync). Shapes: B samples, N image tokens, K kept tokens, D width.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sd3_light.config import TrainConfig
from sd3_light.config.cross_checks import token_problems
from sd3_light.config.faults import Fault, UserError
from sd3_light.config.schema_blocks import BlockPair, TokenRoute

Compare = Callable[[Tensor, Tensor], Tensor]
"""(early tokens, late tokens without a gradient) -> loss of each sample."""


class BetweenOptions(NamedTuple):
    """The route and the pair of blocks of a run; None where the config has none."""

    route: TokenRoute | None = None
    pair: BlockPair | None = None

    @staticmethod
    def of(config: TrainConfig, transformer: SD3Transformer2DModel) -> "BetweenOptions":
        """Return the options for a denoiser; raise a UserError if it lacks these blocks or places."""
        num_blocks = len(transformer.transformer_blocks)
        for key, fields in token_problems(config, num_blocks, transformer.config.pos_embed_max_size).items():
            raise UserError(str(Fault("[model]", key, **fields)))
        sync = config.terms.layer_sync
        return BetweenOptions(config.model.route(num_blocks), None if sync is None else sync.pair(num_blocks))


class BetweenBlocks:
    """Takes the image tokens after each block of one forward pass, and returns those that the next block gets.

    ``kept_BK`` are the tokens that run through the routed blocks; None: all. ``compare`` is called with the tokens
    after both blocks of the pair, as far as both have them, and ``compared`` is its result. ``features`` are the tokens
    after the blocks ``taps``.
    """

    def __init__(
        self, options: BetweenOptions, kept_BK: Tensor | None, compare: Compare, taps: Collection[int] = ()
    ) -> None:
        self.features: dict[int, Tensor] = {}
        self._taps = taps
        self._route = options.route if kept_BK is not None else None
        self._pair = options.pair
        self._kept = kept_BK
        self._compare = compare
        self._waiting: Tensor | None = None  # all tokens, while only the kept ones run
        self._early: tuple[Tensor, bool] | None = None
        self.compared: Tensor | None = None

    @property
    def num_kept(self) -> int | None:
        """The number of tokens in routed blocks, K; None without routing."""
        return None if self._route is None or self._kept is None else self._kept.shape[1]

    def acts_after(self, block: int) -> bool:
        """Return whether the tokens after a block (0: the embedding) are changed or compared."""
        route = () if self._route is None else (self._route.first - 1, self._route.last)
        return block in (*route, *(self._pair or ()), *self._taps)

    def after(self, block: int, image_BND: Tensor) -> Tensor:
        """Return the tokens for the next block."""
        if block in self._taps:
            self.features[block] = image_BND
        if self._route is not None and block == self._route.last:
            assert self._waiting is not None
            image_BND = put_tokens(self._waiting, self._rows(self._waiting), image_BND)
            self._waiting = None
        if self._pair is not None and block == self._pair.early:
            self._early = image_BND, self._waiting is not None
        if self._pair is not None and block == self._pair.late:
            self.compared = self._compare_with(image_BND.detach())
        if self._route is not None and block == self._route.first - 1:
            self._waiting = image_BND
            image_BND = take_tokens(image_BND, self._rows(image_BND))
        return image_BND

    def _compare_with(self, late: Tensor) -> Tensor:
        """Compare the tokens that both blocks have."""
        assert self._early is not None
        early, early_is_routed = self._early
        self._early = None
        late_is_routed = self._waiting is not None
        if early_is_routed and not late_is_routed:
            late = take_tokens(late, self._rows(late))
        elif late_is_routed and not early_is_routed:
            early = take_tokens(early, self._rows(early))
        # recomputed in the backward pass: only both inputs are kept
        compared: Tensor = checkpoint(self._compare, early, late, use_reentrant=False, preserve_rng_state=False)
        return compared

    def _rows(self, image_BND: Tensor) -> Tensor:
        """Return the kept rows of [B N, D]."""
        assert self._kept is not None
        first_B1 = torch.arange(len(image_BND), device=image_BND.device)[:, None] * image_BND.shape[1]
        return (first_B1 + self._kept).flatten()


def take_tokens(image_BND: Tensor, rows: Tensor) -> Tensor:
    """Return the tokens [B, K, D] at ``rows`` of [B N, D]."""
    taken = image_BND.flatten(0, 1).index_select(0, rows)
    return taken.view(len(image_BND), -1, taken.shape[1])


def put_tokens(image_BND: Tensor, rows: Tensor, tokens_BKD: Tensor) -> Tensor:
    """Return the image with the tokens at ``rows`` of [B N, D] replaced."""
    tokens = tokens_BKD.flatten(0, 1).to(image_BND.dtype)
    return image_BND.flatten(0, 1).index_copy(0, rows, tokens).view_as(image_BND)
