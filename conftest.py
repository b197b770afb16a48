"""One set of fixtures for tests/ and the tests of extras/, whichever are run."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    for plugin in ("in_process", "engines") if is_worker else ("warm",):
        config.pluginmanager.import_plugin(plugin)  # does nothing the second time
