"""Cutting a sequence at places that its own content decides.

Chunks of a fixed length would all change when one item is put in at the front. Here an item ends a chunk because of its
own hash, so what an added or removed item changes ends at the next such item, one or two chunks on.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def is_end(count: int, identity: int, most: int) -> bool:
    """Whether a chunk of ``count`` items ends with the item of this hash; no chunk has more than ``most``.

    A quarter of ``most`` is the least (but for the last chunk of all), a little more than half the mean.
    """
    return count >= most or (count >= most // 4 and identity % max(2, most // 3) == 0)


def chunks(items: Iterable[Item], identity: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """The items in order, as chunks of at most ``most``."""
    chunk: list[Item] = []
    for item in items:
        chunk.append(item)
        if is_end(len(chunk), identity(item), most):
            yield chunk
            chunk = []
    if chunk:
        yield chunk
