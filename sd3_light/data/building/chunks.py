"""Content-defined chunking.

With chunks of fixed length, one item inserted at the front would change all of them. Here an item's own hash decides
whether it ends a chunk, so a change affects only the chunks up to the next such item, one or two of them.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def is_end(count: int, identity: int, max_items: int) -> bool:
    """Return whether the item with this hash ends a chunk of ``count`` items.

    Chunks have ``max_items // 4`` to ``max_items`` items (the last may have fewer), a little over half of ``max_items``
    on average.
    """
    return count >= max_items or (count >= max_items // 4 and identity % max(2, max_items // 3) == 0)


def chunks(items: Iterable[T], identity: Callable[[T], int], max_items: int) -> Iterator[list[T]]:
    """Yield the items in order, in chunks of at most ``max_items``."""
    chunk: list[T] = []
    for item in items:
        chunk.append(item)
        if is_end(len(chunk), identity(item), max_items):
            yield chunk
            chunk = []
    if chunk:
        yield chunk
