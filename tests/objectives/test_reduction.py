"""Sums and means of packed sequences equal naive loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive import columns

from common.objectives.reduction import sequence_mean, sequence_sum

streams = st.lists(
    st.lists(st.tuples(st.booleans(), st.floats(-50, 50)), min_size=1, max_size=5),
    min_size=1,
    max_size=5,
)


@given(streams)
def test_sequence_sums_and_means_count_only_trained_tokens(sequences):
    """The values of the other tokens are arbitrary."""
    sums, means, grads, tokens = [], [], [], [token for sequence in sequences for token in sequence]
    for sequence in sequences:
        trained = [x for is_trained, x in sequence if is_trained]
        sums += [math.fsum(trained)] * len(sequence)
        means += [math.fsum(trained) / max(1, len(trained))] * len(sequence)
        grads += [float(is_trained) * len(sequence) for is_trained, _ in sequence]
    mask_T = torch.tensor([is_trained for is_trained, _ in tokens])
    ids_T = torch.arange(len(sequences)).repeat_interleave(
        torch.tensor([len(sequence) for sequence in sequences])
    )
    x_T = columns((x if is_trained else math.nan,) for is_trained, x in tokens)[0].requires_grad_()
    sum_T, mean_T = sequence_sum(x_T, mask_T, ids_T), sequence_mean(x_T, mask_T, ids_T)
    assert sum_T.tolist() == pytest.approx(sums, abs=1e-9) and mean_T.tolist() == pytest.approx(
        means, abs=1e-9
    )
    assert torch.autograd.grad(sum_T.sum(), x_T)[0].tolist() == grads


def test_sequence_sums_are_float64_for_every_input_dtype():
    mask_T, ids_T = torch.ones(3).bool(), torch.tensor([0, 0, 1])
    big_T = torch.tensor([2.0**24, 1, 1])  # in float32 the first 1 would be lost
    assert sequence_sum(big_T, mask_T, ids_T).tolist() == [2.0**24 + 1, 2.0**24 + 1, 1]
    assert sequence_sum(mask_T, mask_T, ids_T).tolist() == [2, 2, 1]
    assert sequence_mean(big_T, mask_T, ids_T).dtype == torch.float64
