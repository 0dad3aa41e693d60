"""Odd values and mutations: of configs by their schema, of JSON, and of bytes, from one seeded generator."""

import copy
import random
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from sd3_light.config.base import Table, element_type, field_types, known_values, table_type, unwrap_annotation

# fmt: off
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.0, 0.5, 1e-300, 1e308,
    float("nan"), float("inf"),
    "", "x", "0", "../x", "/", "~no_such_user", "a\0b", "x" * 5000, "\u202e\U0001f600", "null", [], {}, [[]],
    [0], ["x"], {"a": {}}, [1, "x", None],
)
# fmt: on
_SEEDS = (0, 1, 2, 3, 5, 16, 100)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def odd(rng: random.Random) -> Any:
    return nested(rng.choice((10, 90, 200))) if rng.random() < 0.05 else copy.deepcopy(rng.choice(ODD))


def valid(annotation: Any, rng: random.Random) -> Any:
    """Return a value that a type of a config allows, preferably at its limits; None if it has no simple values."""
    bare, notes = unwrap_annotation(annotation)
    if values := known_values(annotation):
        return rng.choice(values)
    if get_origin(bare) is Literal:
        return rng.choice(get_args(bare))
    if bare is bool or bool in get_args(bare):
        return rng.random() < 0.5
    if bare in (int, float):
        return _number(bare, notes, rng)
    if bare is str:
        return rng.choice(("", "x", "a photo, ", "日本語", "x" * 300, "%s{}"))
    if get_origin(bare) is tuple and table_type(element_type(annotation, 0)) is None:
        items = [valid(element_type(annotation, index), rng) for index in range(2)]
        return None if None in items else items
    return None


def _number(kind: type, notes: tuple[Any, ...], rng: random.Random) -> int | float:
    low = next((getattr(note, "ge", getattr(note, "gt", 0)) for note in notes if isinstance(note, Ge | Gt)), 0)
    high = next((getattr(note, "le", getattr(note, "lt", 0)) for note in notes if isinstance(note, Le | Lt)), 1e6)
    choices = (low, low + 1, high, (low + high) / 2, low + 1e-9, *_SEEDS, 64, 1000, rng.uniform(0, 3))
    fitting = [value for value in choices if low <= value <= high]
    return kind(rng.choice(fitting))


def set_keys(raw: dict[str, Any], schema: type[Table], rng: random.Random, count: int, valid_share: float) -> None:
    """Set ``count`` random keys of a table, or of its tables, mostly to values that the schema allows."""
    for _ in range(count):
        key, annotation = rng.choice(list(field_types(schema).items()))
        inner = table_type(annotation)
        if inner is not None and rng.random() < 0.95:
            table = raw.setdefault(key, {})
            if isinstance(table, dict):
                set_keys(table, inner, rng, 1, valid_share)
            continue
        value = valid(annotation, rng) if rng.random() < valid_share else odd(rng)
        if value is not None:
            raw[key] = value
        elif rng.random() < 0.1:
            raw.pop(key, None)


def mutate_json(value: Any, rng: random.Random, count: int = 1) -> Any:
    """Return a copy with some inner values replaced, removed, repeated or changed a little."""
    value = copy.deepcopy(value)
    for _ in range(count):
        spots = list(_spots(value))
        if not spots:
            return odd(rng)
        container, key = rng.choice(spots)
        action = rng.choice(("odd", "odd", "near", "remove", "add"))
        if action == "odd":
            container[key] = odd(rng)
        elif action == "near":
            container[key] = _near(container[key], rng)
        elif action == "remove":
            del container[key]
        elif isinstance(container, dict):
            container[rng.choice(("x", "", "__metadata__", "a" * 300))] = odd(rng)
        else:
            container.append(odd(rng))
    return value


def _spots(value: Any) -> list[tuple[Any, Any]]:
    spots: list[tuple[Any, Any]] = []
    pending = [value]
    while pending and len(spots) < 5000:
        item = pending.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        spots += [(item, key) for key in keys]
        pending += [item[key] for key in keys]
    return spots


def _near(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1, 8, -value, value, 2**40))
    if isinstance(value, float):
        return value * rng.choice((0.5, 2, -1, 1e30))
    if isinstance(value, str):
        return rng.choice((value[:-1], value + "x", value.upper(), value[::-1], f"../{value}"))
    return [value]


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes truncated, with some changed, or with a piece removed, repeated or inserted."""
    if not data:
        return rng.randbytes(20)
    begin, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    end = min(end, begin + 1000)
    deep = rng.choice((b"[", b"{", b'{"a":')) * rng.choice((10, 3000, 20_000))
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: data[:begin],
        lambda: data[:begin] + data[end:],
        lambda: data[:end] + data[begin:end] * 3 + data[end:],
        lambda: data[:begin] + rng.randbytes(rng.choice((1, 8, 100))) + data[begin:],
        lambda: data[:begin] + bytes([rng.randrange(256)]) + data[begin + 1 :],
        lambda: data[:begin] + deep + data[begin:],
        lambda: data[:begin] + b"9" * 6000 + data[begin:],
        lambda: data[:begin] + b"\0" * 600 + data[begin:],
    )
    return rng.choice(changes)()
