"""A separate temporary folder for every test."""

import tempfile

import pytest


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch, tmp_path):
    """Keep the folders of other test runs out of `hostile.left_over`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
