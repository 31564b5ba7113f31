"""Single mutations of a module's source: small edits, each of which gives valid, different code.

What nobody is meant to test is left alone: docstrings, annotations, asserts, messages of exceptions, logging, what
stands at a module's top level.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

COMPARISONS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
}
ARITHMETIC = {
    "+": "-",
    "-": "+",
    "*": "+",
    "/": "*",
    "//": "*",
    "%": "//",
    "<<": ">>",
    ">>": "<<",
    "&": "|",
    "|": "&",
    "^": "&",
    "**": "*",
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SILENT = ("logger", "logging", "warnings")
"""Calls of their attributes are not mutated."""


@dataclass(frozen=True)
class Mutation:
    """Bytes ``start`` to ``end`` of the source become ``text``. ``line``: from 1."""

    operator: str
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def diff(self, source: str, name: str) -> str:
        """What changes, with two lines around it."""
        lines = difflib.unified_diff(
            source.splitlines(), self.apply(source).splitlines(), name, name, n=2, lineterm=""
        )
        return "\n".join(list(lines)[2:])


def mutations(source: str) -> list[Mutation]:
    """All mutations of a module, in the order of its text. Now and then one is no valid code, see `is_valid`."""
    finder = _Finder(source)
    finder.module(ast.parse(source))
    found = {(m.start, m.end, m.text): m for m in finder.found}
    return sorted(found.values(), key=lambda m: (m.start, m.end, m.operator, m.text))


def is_valid(source: str, mutation: Mutation) -> bool:
    """Whether the mutated source can be compiled, and says something else (some milliseconds)."""
    try:
        tree = ast.parse(mutation.apply(source))
        compile(tree, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return ast.dump(tree) != _dumped(source)


@lru_cache(maxsize=8)
def _dumped(source: str) -> str:
    return ast.dump(ast.parse(source))


class _Finder:
    def __init__(self, source: str) -> None:
        self.found: list[Mutation] = []
        self._data = source.encode()
        self._lines = [0]
        for line in self._data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    # ---------------------------------------------------------------------------------- where things stand

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr | ast.stmt) -> str:
        return self._data[self._start(node) : self._end(node)].decode()

    def _replace(self, operator: str, node: ast.expr | ast.stmt, text: str) -> None:
        self.found.append(Mutation(operator, node.lineno, self._start(node), self._end(node), text))

    def _between(self, operator: str, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Replace the operator that stands between two operands, in brackets or not."""
        low, high = self._end(left), self._start(right)
        gap = self._data[low:high].decode()
        at = _position(gap, old)
        if at is None:
            return
        start = low + len(gap[:at].encode())
        line = self._data[:start].count(b"\n") + 1
        self.found.append(Mutation(operator, line, start, start + len(old.encode()), new))

    # ------------------------------------------------------------------------------------------ statements

    def module(self, tree: ast.Module) -> None:
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self._statement(node)

    def _block(self, body: list[ast.stmt]) -> None:
        for i, node in enumerate(body):
            docstring = i == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not docstring:
                self._statement(node)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if node.name == "__repr__" or any("overload" in self._text(d) for d in node.decorator_list):
                    return
                for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                    self._expression(default)
                self._block(node.body)
            case ast.ClassDef():
                self._block(node.body)
            case ast.If() | ast.While():
                if "TYPE_CHECKING" in self._text(node.test):
                    return
                self._condition(node.test)
                self._block(node.body)
                self._block(node.orelse)
            case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal():
                pass
            case ast.Raise():
                self._replace("delete statement", node, "pass")
            case ast.Return():
                if node.value is not None:
                    if not (isinstance(node.value, ast.Constant) and not node.value.value):  # as good as None
                        self._replace("return None", node, "return None")
                    self._expression(node.value)
            case ast.Break():
                self._replace("break and continue", node, "continue")
            case ast.Continue():
                self._replace("break and continue", node, "break")
            case ast.AugAssign():
                self._augmented(node)
            case ast.Assign() | ast.AnnAssign():
                self._assignment(node)
            case ast.Expr():
                if not isinstance(node.value, ast.Constant) and not self._is_silent(node.value):
                    if not isinstance(node.value, ast.Yield | ast.YieldFrom):
                        self._replace("delete statement", node, "pass")
                    self._expression(node.value)
            case ast.Delete():
                self._replace("delete statement", node, "pass")
            case _:
                self._compound(node)

    def _compound(self, node: ast.stmt) -> None:
        """for, with, try, match: expressions and blocks inside."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child)
            elif isinstance(child, ast.withitem):
                self._expression(child.context_expr)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                self._block(child.body)
            elif isinstance(child, ast.stmt):
                self._statement(child)

    def _assignment(self, node: ast.Assign | ast.AnnAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        if node.value is None or names & {"__slots__", "__all__", "name"}:
            return
        # Without a plain variable nothing after it runs, and any test sees that.
        if not any(isinstance(target, ast.Name | ast.Tuple) for target in targets):
            self._replace("delete statement", node, "pass")
        self._expression(node.value)

    def _augmented(self, node: ast.AugAssign) -> None:
        self._replace("delete statement", node, "pass")
        symbol = _SYMBOLS.get(type(node.op))
        if symbol in ARITHMETIC and not _is_text(node.value):
            self._between("arithmetic", node.target, node.value, f"{symbol}=", f"{ARITHMETIC[symbol]}=")
        self._expression(node.value)

    def _is_silent(self, node: ast.expr) -> bool:
        call = node.func if isinstance(node, ast.Call) else None
        return isinstance(call, ast.Attribute) and self._text(call.value) in _SILENT

    # ----------------------------------------------------------------------------------------- expressions

    def _condition(self, node: ast.expr) -> None:
        # `_expression` takes a "not" away, and turns "is", "==" and "in" into their opposites.
        opposite = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            opposite = isinstance(node.ops[0], ast.Is | ast.IsNot | ast.Eq | ast.NotEq | ast.In | ast.NotIn)
        if not opposite:
            self._replace("negate condition", node, f"not ({self._text(node)})")
        self._expression(node)

    def _expression(self, node: ast.expr) -> None:
        match node:
            case ast.Constant():
                self._constant(node)
                return
            case ast.JoinedStr():
                return
            case ast.Compare():
                self._comparison(node)
            case ast.BoolOp():
                old = "and" if isinstance(node.op, ast.And) else "or"
                new = "or" if old == "and" else "and"
                for left, right in zip(node.values, node.values[1:], strict=False):
                    self._between("and, or", left, right, old, new)
            case ast.BinOp():
                symbol = _SYMBOLS.get(type(node.op))
                if symbol in ARITHMETIC and not _is_text(node.left) and not _is_text(node.right):
                    self._between("arithmetic", node.left, node.right, symbol, ARITHMETIC[symbol])
            case ast.UnaryOp():
                if isinstance(node.op, ast.Not | ast.USub | ast.Invert) and not isinstance(
                    node.operand, ast.Constant
                ):
                    self._replace("drop not or minus", node, f"({self._text(node.operand)})")
            case ast.IfExp():
                self._condition(node.test)
                self._expression(node.body)
                self._expression(node.orelse)
                return
            case ast.Call():
                self._call(node)
                if self._is_silent(node):
                    return
            case ast.Slice():
                for bound in (node.lower, node.upper):
                    if bound is not None and not isinstance(bound, ast.Constant):
                        self._replace("bound of a slice", bound, f"({self._text(bound)}) + 1")
        for child in _expressions(node):
            self._expression(child)

    def _constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace("constant", node, str(not value))
        elif isinstance(value, int):
            self._replace("constant", node, f"({value + 1})" if value < 0 else str(value + 1))
            if value > 0:
                self._replace("constant", node, str(value - 1))
        elif isinstance(value, float) and value == value and abs(value) != float("inf"):
            self._replace("constant", node, repr(value + 1.0))

    def _comparison(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            symbol = _SYMBOLS[type(operator)]
            self._between("comparison", left, right, symbol, COMPARISONS[symbol])
            left = right

    def _call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            self._replace("min, max, any, all", node.func, NAMES[node.func.id])
        if not any(isinstance(argument, ast.Starred) for argument in node.args):
            for one, other in zip(node.args, node.args[1:], strict=False):
                texts = self._text(one), self._text(other)
                commutes = isinstance(node.func, ast.Name) and node.func.id in (*NAMES, "isinstance")
                if texts[0] != texts[1] and not commutes:
                    between = self._data[self._end(one) : self._start(other)].decode()
                    start, end = self._start(one), self._end(other)
                    swapped = texts[1] + between + texts[0]
                    self.found.append(Mutation("swap arguments", one.lineno, start, end, swapped))


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions right below one, those of keywords and comprehensions included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.keyword | ast.comprehension):
            yield from _expressions(child)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _position(gap: str, old: str) -> int | None:
    """Where the operator stands in what is between its operands: brackets, blanks and comments besides."""
    at = 0
    while at < len(gap):
        if gap[at] == "#":
            at = gap.find("\n", at)
            if at < 0:
                return None
        elif gap.startswith(old, at):
            return at
        at += 1
    return None


_SYMBOLS: dict[type[ast.AST], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.Pow: "**",
}
