"""Tiny models of images and text, and a data set of pictures."""

from pathlib import Path

import pytest

import sft
from common.data.encode import Encoder
from common.model.hub import load_tokenizer
from extras.images.tests.checkpoints import FAMILIES, dataset


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folder of a tiny model of each family, written when it is first asked for."""
    made = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = FAMILIES[family](tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    return dataset(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def encoder_of(checkpoints):
    """The encoder of a tiny model with flags of sft.py."""

    def get(family: str, **flags) -> Encoder:
        path = str(checkpoints(family))
        args = sft.Args(model=path, dataset=["-"], vision="frozen", **flags)
        return Encoder(load_tokenizer(path, args), args)

    return get
