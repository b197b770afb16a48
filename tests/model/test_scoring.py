"""Log-probs and values of a rollout, and stored log-probs of a dataset."""

import copy
import json
import shutil
from dataclasses import replace
from itertools import chain

import pytest
import torch

from common.data.packing import pack, pack_minibatches
from common.data.sample import Sample
from common.model.hub import load_tokenizer
from common.model.policy import load_policy, load_scalar_model
from common.model.scoring import reference_logps, with_logprobs, with_values
from common.model.tiny import tiny_model
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


def store(data, policy, folder, **flags) -> list[float]:
    """Return the log-probs of training and held-out samples. Without a `policy` those of the file
    have to serve."""
    args = replace(ARGS, output_dir=str(folder), pack_tokens=40, **flags)
    parts = [[[sample] for sample in data[:1]], [[sample] for sample in data[1:]]]
    tokenizer = load_tokenizer(tiny_model())
    scored = reference_logps(policy, parts, tokenizer, args, torch.device("cpu"))
    return torch.cat(scored)[:, 0].tolist()


def test_stored_logprobs_are_completion_sums_and_computed_once(tmp_path, device):
    data, policy = samples(), load_policy(tiny_model(), ARGS, device, trainable=False)
    first = store(data, policy, tmp_path)
    for sample, logp in zip(data, first, strict=True):
        (mb,) = pack([sample], 100, device)
        with torch.no_grad():
            assert logp == pytest.approx(mb.sequence_sums(policy(mb)[0]).item(), abs=1e-4)
    assert store(data, None, tmp_path) == first and not list(tmp_path.glob("*.tmp"))
    copied = shutil.copytree(tiny_model(), tmp_path / "copied")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps(dict(peft_type="LORA", r=1, lora_alpha=1, target_modules="all-linear"))
    )
    (adapter / "adapter_model.safetensors").touch()
    masked, other = (copy.deepcopy(data) for _ in range(2))
    masked[2].loss_mask[-1], other[2].ids[-1] = False, 7
    for changed, flags in (
        (data[:-1], {}), (masked, {}), (other, {}), (data, dict(dtype="bfloat16")),
        (data, dict(model=str(copied))),
        (data, dict(adapter=str(adapter), lora_rank=1, lora_alpha=1.0)),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match="'NoneType' object has no attribute"):
            store(changed, None, tmp_path, **flags)
    assert store(data, None, tmp_path) == first


@pytest.mark.parametrize("text", ["{", "[]", '{"logps": []}', "null", "short", "digit"])
def test_damaged_logprob_file_is_refused_by_name(text, tmp_path, device):
    data, file = samples(2), tmp_path / "reference_logps.json"
    if text in ("short", "digit"):
        store(data, load_policy(tiny_model(), ARGS, device, trainable=False), tmp_path)
        stored = file.read_text()
        fields = json.loads(stored)
        short = json.dumps(fields | dict(logps=fields["logps"][:1]))
        text = short if text == "short" else stored.replace(".", ".1", 1)
    file.write_text(text)
    with pytest.raises(ValueError, match="reference_logps.json is damaged; delete it: "):
        store(data, None, tmp_path)
