"""A file with tools."""

import pytest

from extras.tools.tests.episodes import FILE


@pytest.fixture
def file(tmp_path):
    (tmp_path / "my_tools.py").write_text(FILE)
    return tmp_path / "my_tools.py"
