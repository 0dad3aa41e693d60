"""The tables that name blocks of the denoiser: [model.routing] and [model.layer_sync]. Blocks count from 1."""

from typing import Annotated, NamedTuple

from annotated_types import Gt, Lt
from pydantic import Field, Strict

from sd3_light.config.base import Count, Positive, Table


class TokenRoute(NamedTuple):
    """The blocks ``first`` to ``last``, which a ``share`` of the image tokens skips in training."""

    share: float
    first: int
    last: int

    def tokens_in(self, block: int, tokens: int) -> int:
        """Return how many of ``tokens`` image tokens run through a block."""
        return num_kept(tokens, self.share) if self.first <= block <= self.last else tokens


class BlockPair(NamedTuple):
    """Two blocks: the image tokens after ``early`` are aligned with those after ``late``."""

    early: int
    late: int


def num_kept(tokens: int, share: float) -> int:
    """Return how many of ``tokens`` remain if a share of them, rounded down, is left out; at least one."""
    return tokens - int(tokens * share)


class RoutingConfig(Table):
    """[model.routing]: let some image tokens skip the middle blocks in training (TREAD, arXiv 2501.04765)."""

    share: Annotated[float, Strict(), Gt(0), Lt(1)] = 0.5
    """Share of each image's tokens that skips the routed blocks and returns after them."""
    first_block: Count | None = Field(default=None, json_schema_extra={"default": "3, or the last block but one"})
    """First block that they skip, counted from 1."""
    last_block: Count | None = Field(default=None, json_schema_extra={"default": "number of blocks - 4"})
    """Last block that they skip; at most the number of blocks minus 1."""

    def route(self, num_blocks: int) -> TokenRoute:
        """Return the route through a denoiser with ``num_blocks`` blocks, valid or not."""
        first = self.first_block or min(3, num_blocks - 1)
        return TokenRoute(self.share, first, self.last_block or max(first, num_blocks - 4))


class LayerSyncConfig(Table):
    """[model.layer_sync]: align an early block's image tokens with a later block's (LayerSync, arXiv 2510.12581)."""

    weight: Positive = 0.2
    """Weight of the alignment loss."""
    early_block: Count | None = Field(default=None, json_schema_extra={"default": "2/7 of the blocks, rounded"})
    """Block whose image tokens are trained, counted from 1."""
    late_block: Count | None = Field(default=None, json_schema_extra={"default": "4/7 of the blocks, rounded"})
    """Block whose image tokens are the target, without a gradient; at most the number of blocks minus 1."""

    def pair(self, num_blocks: int) -> BlockPair:
        """Return the blocks of a denoiser with ``num_blocks`` blocks, valid or not."""
        early = self.early_block or max(1, round(2 * num_blocks / 7))
        return BlockPair(early, self.late_block or max(early + 1, round(4 * num_blocks / 7)))


def routing_problem(table: RoutingConfig, num_blocks: int) -> dict[str, str] | None:
    """Return why a denoiser with ``num_blocks`` blocks has no such route, as fields of a `Fault`."""
    _, first, last = table.route(num_blocks)
    if 1 <= first <= last < num_blocks:
        return None
    return {
        "problem": f"tokens cannot skip blocks {first} to {last} of {num_blocks}",
        "allowed": f"first_block <= last_block <= {num_blocks - 1}: they return before the last block",
    }


def layer_sync_problem(table: LayerSyncConfig, num_blocks: int) -> dict[str, str] | None:
    """Return why a denoiser with ``num_blocks`` blocks has no such pair, as fields of a `Fault`."""
    early, late = table.pair(num_blocks)
    if 1 <= early < late < num_blocks:
        return None
    return {
        "problem": f"block {early} cannot be aligned with block {late} of {num_blocks}",
        "allowed": f"early_block < late_block <= {num_blocks - 1}: the last block prepares the output",
    }
