"""One set of fixtures for tests/ and the tests of extras/, whichever are run."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        import warm

        return warm.share()  # the controller of xdist runs no test
    for plugin in ("in_process", "engines"):
        config.pluginmanager.import_plugin(plugin)  # does nothing the second time
