"""Tiny models of images and text, and a data set of pictures."""

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import write_rows

import sft
from common.text.encode import Encoder
from common.text.tokenizer import load_tokenizer
from extras.images.tests.checkpoints import FAMILIES, dataset, picture


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
        return Encoder(load_tokenizer(path, args), args, image_args=args)

    return get


@pytest.fixture(scope="module")
def trained(checkpoints, tmp_path_factory, main):
    """A run with own pictures: `folder`, `pictures`, and what its console shows."""
    folder = tmp_path_factory.mktemp("trained")
    pictures = []
    for i in range(2):
        pictures.append(folder / f"{i}.png")
        picture(60, 40, i).save(pictures[-1])
    rows = [
        dict(images=["0.png", "1.png"], prompt="Two?", completion="yes"),
        dict(prompt="None?", completion="no"),
    ]
    data = write_rows(folder / "rows.jsonl", rows)
    flags = ("--model", checkpoints("idefics3"), "--dataset", data,
             "--vision", "frozen", "--prompt_format", "chat", "--max_steps", 1, "--batch_size", 2,
             "--eval_every", 0)  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()) as console:
        main("sft", *flags, "--output_dir", folder / "run")
    return SimpleNamespace(folder=folder / "run", pictures=pictures, console=console.getvalue())
