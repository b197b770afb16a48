"""Samples: parts of their ids, the version of a completion, and the sequence that makes them."""

import pytest

from common.data.sample import Completion, Sample, first
from common.data.token_cache import Samples


def test_sample_splits_into_prompt_and_completion():
    sample = Sample([5, 6, 7, 8], [False, False, True, True], prompt_length=2)
    assert sample.prompt_ids == [5, 6] and sample.completion_ids == [7, 8] and sample.num_targets == 3
    assert first(sample) is sample and first([sample, Sample([1], [True])]) is sample


def test_completion_version_is_that_of_its_oldest_sampled_token():
    completion = Completion([5, 6, 7, 8], [False, True, False, True], 1, versions=[-1, 4, -1, 3])
    assert completion.version == 3


def test_samples_are_made_on_access():
    made = []

    def make(i: int) -> list[Sample]:
        made.append(i)
        return [Sample([i], [True])]

    groups = Samples([{}] * 3, make)
    assert len(groups) == 3 and not made
    assert groups[-1][0].ids == [2] and made == [2]
    assert [group[0].ids for group in groups] == [[0], [1], [2]]
    with pytest.raises(IndexError):
        groups[3]
