"""The exact value of an arithmetic expression. A model wrote the text, so nothing here calls
`eval`."""

import ast
import operator
import re
from fractions import Fraction

# in characters: bounds the depth of the recursion and the size of the numbers
MAX_EXPRESSION = 200
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def arithmetic(expression: str) -> tuple[Fraction | None, list[int]]:
    """Return the exact value of an expression and the numbers in it. Only whole numbers,
    parentheses and binary + - * / are allowed. The value is None for anything else, and for a
    division by zero."""
    expression = expression.translate(str.maketrans("×÷−", "*/-"))
    # These characters cannot form names, floats, comments or line breaks, and the parser has
    # nothing to warn about.
    if len(expression) > MAX_EXPRESSION or not re.fullmatch(r"[0-9+\-*/() ]+", expression):
        return None, []
    try:
        value = evaluate(ast.parse(expression, mode="eval").body)
        return value, [int(digits) for digits in re.findall(r"\d+", expression)]
    # KeyError: `**`, `//`; AttributeError: signs, calls, tuples; MemoryError: nested too deep
    except (SyntaxError, ValueError, KeyError, AttributeError, ArithmeticError, MemoryError):
        return None, []


def evaluate(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
