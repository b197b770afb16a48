"""Numbers of all ranks are in the order of their positions."""

import math

import torch

from common.parallel import distributed

CPU, NAN = torch.device("cpu"), math.nan


def test_gathered_groups_are_in_the_order_of_their_positions(monkeypatch):
    ranks = [
        ([0, 2], torch.tensor([[0.0], [2.0]])),
        ([1, 3], torch.tensor([[1.0], [3.0]])),
        ([], torch.zeros(0, 1)),
    ]
    monkeypatch.setattr(distributed, "gather_objects", lambda mine: ranks)
    assert distributed.gather_rows(torch.zeros(0, 1), []).tolist() == [[0], [1], [2], [3]]


def test_equal_prompts_are_two_groups():
    """Two draws of one prompt have the same rewards, with a third group between them."""
    x_PG = torch.tensor([[0.0, 1.0], [5.0, 6.0], [0.0, 1.0]])
    assert distributed.gather_rows(x_PG, [4, 0, 2]).tolist() == [[5, 6], [0, 1], [0, 1]]
