"""A temporary folder of its own for every test."""

import tempfile

import pytest


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch, tmp_path):
    """`hostile.left_over` is not to see what other test runs are at."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
