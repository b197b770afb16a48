"""The fixtures that tests/ and the tests of extras/ share, whichever of them are run."""

pytest_plugins = ("warm", "in_process", "engines")
