"""`--tools calculator`."""

from extras.graders.puzzles import arithmetic


def calculator(expression: str) -> str:
    """Return the exact value of an expression.

    Args:
        expression: whole numbers with + - * / and parentheses
    """
    value, _ = arithmetic(expression.strip())
    if value is None:
        raise ValueError("write whole numbers with + - * / and parentheses")
    return str(value)
