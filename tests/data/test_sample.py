"""Samples: parts of their ids, and the version of a completion."""

from common.data.sample import Completion, Sample


def test_sample_splits_into_prompt_and_completion():
    sample = Sample([5, 6, 7, 8], [False, False, True, True], prompt_length=2)
    assert (
        sample.prompt_ids == [5, 6] and sample.completion_ids == [7, 8] and sample.num_targets == 3
    )


def test_completion_version_is_that_of_its_oldest_sampled_token():
    completion = Completion([5, 6, 7, 8], [False, True, False, True], 1, versions=[-1, 4, -1, 3])
    assert completion.version == 3
