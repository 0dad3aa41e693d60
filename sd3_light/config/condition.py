"""The expression of `where`: parsed by `ast`, reduced to a whitelist, and evaluated without `eval`.

Every column has one type, which follows from the constants that it is compared with; columns that are compared only
with each other are numbers. As in SQL, a comparison with a missing value is neither true nor false, but None.
"""

import ast
import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

NUMBER = "a number"
TEXT = "a text"
BOOLEAN = "a boolean"
# a column may have the plain name
WIDTH = "<width>"
HEIGHT = "<height>"
CAPTION_LENGTH = "<caption_length>"
BUILT_IN = {"width": WIDTH, "height": HEIGHT, "caption_length": CAPTION_LENGTH}
"""Names that every sample has, and their keys among the values of a sample."""

_CONSTANTS = {"true": True, "false": False, "null": None}
_MAX_LENGTH = 4000
_MAX_DEPTH = 50
_SUPPORTED = "use comparisons, in, is None, and, or, not, + - * / and column[...]"
_KINDS: dict[type, str] = {bool: BOOLEAN, int: NUMBER, float: NUMBER, str: TEXT}
_Operator = Callable[[Any, Any], Any]
_Operators = dict[type, _Operator]
_ARITHMETIC: _Operators = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_EQUALITY: _Operators = {ast.Eq: operator.eq, ast.NotEq: operator.ne}
_ORDER: _Operators = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
_MEMBERSHIP: _Operators = {ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b}
_IDENTITY: _Operators = {ast.Is: operator.is_, ast.IsNot: operator.is_not}
_COMPARISONS = _EQUALITY | _ORDER | _MEMBERSHIP

_Evaluate = Callable[[Mapping[str, Any]], Any]
_Typed = tuple[_Evaluate, str | None]
"""A compiled part and its type; None for a column of unknown type, and for `null`."""


class ConditionError(ValueError):
    """An invalid expression. The text says what is wrong and at which position."""


@dataclass(frozen=True)
class Term:
    """A part of a condition, and the keys of the values that it uses."""

    evaluate: _Evaluate
    keys: frozenset[str]


@dataclass(frozen=True)
class Condition:
    """Terms that must all be true; ``kinds`` are the types of the columns, None where any is allowed."""

    terms: tuple[Term, ...]
    kinds: Mapping[str, str | None]

    @property
    def keys(self) -> frozenset[str]:
        """The keys of all values that the condition uses."""
        return frozenset().union(*(term.keys for term in self.terms))

    def matches(self, values: Mapping[str, Any]) -> bool:
        """Return whether every term is true; a value that is absent or None is missing."""
        for term in self.terms:  # noqa: SIM110 (a generator takes twice as long)
            if term.evaluate(values) is not True:
                return False
        return True

    def split(self, keys: Collection[str]) -> tuple["Condition", "Condition"]:
        """Return the terms that use none of ``keys``, and the others."""
        first = tuple(term for term in self.terms if term.keys.isdisjoint(keys))
        rest = tuple(term for term in self.terms if not term.keys.isdisjoint(keys))
        return Condition(first, self.kinds), Condition(rest, self.kinds)


@lru_cache(maxsize=64)
def parse_condition(text: str) -> Condition:
    """Parse an expression; an empty one matches everything. Raises ConditionError."""
    if not text.strip():
        return Condition((), {})
    if len(text) > _MAX_LENGTH:
        raise ConditionError(f"longer than {_MAX_LENGTH:,} characters")
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # as Python counts lines
    lines = text.split("\n")
    body = _parse(text)
    kinds: dict[str, str | None] = {}
    _Compiler(lines, kinds, None).value(body, BOOLEAN)
    terms = []
    for part in _conjuncts(body):  # types that constants determine are known now, in whatever order the columns appear
        compiler = _Compiler(lines, kinds, NUMBER)
        evaluate, _ = compiler.value(part, BOOLEAN)
        terms.append(Term(evaluate, frozenset(compiler.keys)))
    return Condition(tuple(terms), kinds)


def _parse(text: str) -> ast.expr:
    lines = text.split("\n")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in a text
            if len(lines) == 1:  # without brackets, which change Python's messages
                ast.parse(text.strip(), mode="eval")
            # in brackets, so that it may have several lines; on separate ones, so that positions are those of the text
            return ast.parse(f"(\n{text}\n)", mode="eval").body
    except SyntaxError as error:
        line, indent = ((error.lineno or 2) - 1, 0) if len(lines) > 1 else (1, len(text) - len(text.lstrip()))
        column = indent + (error.offset or _MAX_LENGTH) - 1  # Python 3.11 gives 0 for the end
        position = _position(lines, line, column)
        raise ConditionError(f"{error.msg} {position}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # a zero byte, or nested too deeply
        raise ConditionError(f"cannot be parsed: {error}") from error


def _conjuncts(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        return [part for value in node.values for part in _conjuncts(value)]
    return [node]


def _position(lines: Sequence[str], line: int, column: int) -> str:
    """Return a position as text; ``line`` counts from 1, ``column`` from 0."""
    if line > len(lines) or column >= len(lines[line - 1].rstrip()):
        return "at the end"
    number = f"line {line}, " if len(lines) > 1 else ""
    return f"at {number}character {column + 1}"


class _Compiler:
    """Turns nodes into functions of a sample's values and assigns types to columns."""

    def __init__(self, lines: Sequence[str], kinds: dict[str, str | None], default: str | None) -> None:
        self._lines = lines
        self._kinds = kinds
        self._default = default
        self._depth = 0
        self.keys: set[str] = set()

    def value(self, node: ast.expr, expected: str | None = None) -> _Typed:
        """Compile a node, which must be of the type ``expected``."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ConditionError(f"nested deeper than {_MAX_DEPTH} levels")
        evaluate, kind = self._compile(node)
        self._depth -= 1
        if expected is not None:
            self._require(node, kind, expected)
        return evaluate, kind or expected

    def _compile(self, node: ast.expr) -> _Typed:
        match node:
            case ast.Name(id=name) if name in _CONSTANTS:
                return self._constant(node, _CONSTANTS[name])
            case ast.Constant(value=value):
                return self._constant(node, value)
            case ast.Name(id=name) if name in BUILT_IN:
                return self._lookup(BUILT_IN[name]), NUMBER
            case ast.Name() | ast.Subscript():
                name = self._column(node)
                return self._lookup(name), self._kinds.setdefault(name, None)
            case ast.BoolOp(op=op, values=values):
                parts = [self.value(part, BOOLEAN)[0] for part in values]
                return _joined(parts, decisive=isinstance(op, ast.Or)), BOOLEAN
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                part = self.value(operand, BOOLEAN)[0]
                return (lambda values: None if (result := part(values)) is None else not result), BOOLEAN
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=operand):
                number = self.value(operand, NUMBER)[0]
                return (_binary(operator.sub, lambda _: 0, number) if isinstance(op, ast.USub) else number), NUMBER
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                first = self.value(left, NUMBER)[0]
                return _binary(_ARITHMETIC[type(op)], first, self.value(right, NUMBER)[0]), NUMBER
            case ast.Compare():
                return self._comparison(node), BOOLEAN
        raise self._error(node, f"is not supported; {_SUPPORTED}")

    def _comparison(self, node: ast.Compare) -> _Evaluate:
        ops = [type(op) for op in node.ops]
        if any(op in _IDENTITY or op in _MEMBERSHIP for op in ops):
            if len(ops) > 1:
                raise self._error(node, "chains `in` or `is`; join single comparisons with and")
            if ops[0] in _IDENTITY:
                return self._is_null(node, _IDENTITY[ops[0]])
        operands = [node.left, *node.comparators]
        if ops[0] in _MEMBERSHIP and isinstance(node.comparators[0], ast.List | ast.Tuple | ast.Set):
            return self._is_listed(node.left, node.comparators[0].elts, _MEMBERSHIP[ops[0]])
        parts = [self.value(operand) for operand in operands]
        kind = TEXT if ops[0] in _MEMBERSHIP else next((kind for _, kind in parts if kind), self._default)
        if kind is not None:
            for operand, (_, own) in zip(operands, parts, strict=True):
                self._require(operand, own, kind)
        if kind == BOOLEAN and any(op in _ORDER for op in ops):
            raise self._error(node, "orders booleans; use == or !=")
        return _chained([_COMPARISONS[op] for op in ops], [evaluate for evaluate, _ in parts])

    def _is_null(self, node: ast.Compare, compare: _Operator) -> _Evaluate:
        right = node.comparators[0]
        is_null = isinstance(right, ast.Constant) and right.value is None
        if not is_null and not (isinstance(right, ast.Name) and right.id == "null"):
            raise self._error(node, "compares with `is`, which works only with None; use ==")
        evaluate, _ = self.value(node.left)
        return lambda values: compare(evaluate(values), None)

    def _is_listed(self, left: ast.expr, items: list[ast.expr], compare: _Operator) -> _Evaluate:
        evaluate, own = self.value(left)
        kind = own
        constants = []
        for item in items:
            keys = set(self.keys)
            constant, item_kind = self.value(item)
            if self.keys != keys or item_kind is None:
                raise self._error(item, "is not a constant; a list contains numbers, texts or booleans")
            self._require(item, item_kind, kind := kind or item_kind)
            constants.append(constant({}))
        if kind is None or not constants:
            raise self._error(left, "is compared with an empty list")
        self._require(left, own, kind)
        return _binary(compare, evaluate, lambda _: constants)

    def _constant(self, node: ast.expr, value: Any) -> _Typed:
        if type(value) not in _KINDS:
            hint = "`is None` finds missing values" if value is None else _SUPPORTED
            raise self._error(node, f"is not a number, text or boolean; {hint}")
        return (lambda _: value), _KINDS[type(value)]

    def _column(self, node: ast.Name | ast.Subscript) -> str:
        if isinstance(node, ast.Name):
            return node.id
        is_column = isinstance(node.value, ast.Name) and node.value.id == "column"
        if not is_column or not isinstance(node.slice, ast.Constant) or not isinstance(node.slice.value, str):
            raise self._error(node, 'is not supported; write column["name"]')
        return node.slice.value

    def _lookup(self, key: str) -> _Evaluate:
        self.keys.add(key)
        return lambda values: values.get(key)

    def _require(self, node: ast.expr, kind: str | None, expected: str) -> None:
        """Raise an error unless the node has the expected type; a column without a type takes it."""
        if kind is None:
            assert isinstance(node, ast.Name | ast.Subscript), "only columns have no type"
            name = self._column(node)
            kind = self._kinds[name] = self._kinds[name] or expected
        if kind != expected:
            raise self._error(node, f"is {kind}, and {expected} is needed there")

    def _error(self, node: ast.expr, problem: str) -> ConditionError:
        first = max(node.lineno, 2)  # a tuple starts on line 1, with the bracket before the text
        line = self._lines[first - 2]
        start = len(line.encode()[: node.col_offset].decode()) if node.lineno == first else 0
        source = line[start:]
        if node.end_lineno == first:
            source = line[start : len(line.encode()[: node.end_col_offset].decode())]
        source = source if len(source) <= 40 else source[:37] + "..."
        return ConditionError(f"`{source}` {problem} ({_position(self._lines, first - 1, start)})")


def _binary(operation: _Operator, left: _Evaluate, right: _Evaluate) -> _Evaluate:
    def evaluate(values: Mapping[str, Any]) -> Any:
        a = left(values)
        b = right(values)
        try:
            return None if a is None or b is None else operation(a, b)
        except (ZeroDivisionError, OverflowError):
            return None

    return evaluate


def _chained(comparisons: Sequence[_Operator], parts: Sequence[_Evaluate]) -> _Evaluate:
    """Return whether all comparisons of neighbours hold, each part evaluated once: chains may be nested."""
    first, *others = parts
    steps = list(zip(comparisons, others, strict=True))

    def evaluate(values: Mapping[str, Any]) -> bool | None:
        left = first(values)
        result: bool | None = True
        for compare, part in steps:
            right = part(values)
            if left is None or right is None:
                result = None
            elif not compare(left, right):
                return False
            left = right
        return result

    return evaluate


def _joined(parts: Sequence[_Evaluate], decisive: bool) -> _Evaluate:
    """Return a function: ``decisive`` if one part is, else None if one is missing, else the opposite."""

    def evaluate(values: Mapping[str, Any]) -> bool | None:
        results = [part(values) for part in parts]
        if decisive in results:
            return decisive
        return None if None in results else not decisive

    return evaluate
