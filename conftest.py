"""One set of fixtures for tests/ and the tests of extras/, whichever are run."""

pytest_plugins = ("warm", "in_process", "engines")
