"""Log-probs and values of a rollout, and log-probs of a data set by its reference."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import chain

import pytest
import torch
from model.checkpoints import with_config

from common.model.policy import load_policy, load_scalar_model
from common.model.scoring import reference_logps, with_logprobs, with_values
from common.model.tiny import tiny_model
from common.packs.packing import pack, pack_minibatches
from common.packs.sample import Sample
from common.text.tokenizer import load_tokenizer
from dpo import Args

ARGS = Args(dtype="float32")


def samples(count: int = 6) -> list[Sample]:
    """Return samples of different lengths; the first two ids are the prompt."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 90, (3 + 2 * n,), generator=generator).tolist() for n in range(count)]
    return [Sample(i, [t >= 2 for t in range(len(i))], prompt_length=2) for i in ids]


def test_added_logprobs_and_values_equal_those_of_a_forward(device):
    """The temperature applies, and no tensor keeps a graph."""
    policy = load_policy(tiny_model(), ARGS, device)
    value = load_scalar_model(tiny_model(), ARGS, device)
    minibatches = pack_minibatches([[s] for s in samples()], range(len(samples())), 2, 20, device)
    assert len(minibatches) == 2 and len(minibatches[1]) > 1
    before = [vars(mb).copy() for mb in chain(*minibatches)]
    added = with_logprobs(with_logprobs(minibatches, 0.7, old=policy), 1.0, ref=policy)
    added = with_values(added, value)
    assert [vars(mb) for mb in chain(*minibatches)] == before
    for mb in chain(*added):
        with torch.no_grad():
            assert torch.equal(mb.old_logprobs_T, policy(mb, temperature=0.7)[0])
            assert torch.equal(mb.ref_logprobs_T, policy(mb)[0])
            assert torch.equal(mb.values_T, value(mb))
        assert not any(x.requires_grad for x in (mb.old_logprobs_T, mb.ref_logprobs_T, mb.values_T))
    assert not torch.equal(mb.old_logprobs_T, mb.ref_logprobs_T)
    policy.reshard(), value.reshard()


def test_logprobs_of_a_reference_are_sums_over_completions(device):
    """Training and held-out samples keep their order and shapes."""
    data, policy = samples(), load_policy(tiny_model(), ARGS, device, trainable=False)
    args = replace(ARGS, pack_tokens=40)
    parts = [[[sample] for sample in data[:1]], [[sample] for sample in data[1:]]]
    scored = reference_logps(policy, parts, load_tokenizer(tiny_model()), args, device)
    assert [each.shape for each in scored] == [(1, 1), (5, 1)]
    for sample, logp in zip(data, torch.cat(scored)[:, 0].tolist(), strict=True):
        (mb,) = pack([sample], 100, device)
        with torch.no_grad():
            assert logp == pytest.approx(mb.sequence_sums(policy(mb)[0]).item(), abs=1e-4)


def test_sequence_beyond_the_context_of_a_reference_is_refused(device, tmp_path):
    short = with_config(tmp_path / "short", max_position_embeddings=8)
    args = replace(ARGS, reference_model=str(short))
    policy, tokenizer = load_policy(tiny_model(), ARGS, device), load_tokenizer(tiny_model())
    for count, fits in ((3, True), (6, False)):  # of at most 7 and 13 tokens
        parts = [[[sample] for sample in samples(count)]]
        words = f"^{short}: a sequence of 12 tokens is longer than its context of 8$"
        with nullcontext() if fits else pytest.raises(ValueError, match=words):
            reference_logps(policy, parts, tokenizer, args, device)
