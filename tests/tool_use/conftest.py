"""A file with tools."""

import pytest

FILE = '''
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: first number
        b: second number
    """
    return a + b


def helper(x):
    return x


def _private():
    """Not a tool."""


class Shelf:
    def reset(self, row):
        self.items = [row["first"]]

    def put(self, item: str) -> list:
        """Put an item on the shelf.

        Args:
            item: its name
        """
        self.items.append(item)
        return self.items

    def close(self):
        pass
'''


@pytest.fixture
def file(tmp_path):
    (tmp_path / "my_tools.py").write_text(FILE)
    return tmp_path / "my_tools.py"
