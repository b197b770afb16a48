"""One set of fixtures for tests/ and the tests of extras/, whichever are run."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("in_process")  # does nothing the second time
