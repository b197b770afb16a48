"""The version of a completion."""

from common.data.sample import Completion


def test_completion_version_is_that_of_its_oldest_sampled_token():
    completion = Completion([5, 6, 7, 8], [False, True, False, True], 1, versions=[-1, 4, -1, 3])
    assert completion.version == 3
