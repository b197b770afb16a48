"""Log-probs and values of a rollout, and stored log-probs of a dataset."""

import json

import pytest
import torch

from common.config.groups import TrainArgs
from common.data.packing import pack, pack_minibatches
from common.data.sample import Sample
from common.model.policy import load_policy, load_scalar_model
from common.model.scoring import store_reference_logps, with_logprobs, with_values
from common.model.tiny import tiny_model

ARGS = TrainArgs(dtype="float32")


def samples(count: int = 6) -> list[Sample]:
    """Return samples of different lengths; the first two ids are the prompt."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 90, (3 + 2 * n,), generator=generator).tolist() for n in range(count)]
    return [Sample(i, [t >= 2 for t in range(len(i))], prompt_length=2) for i in ids]


def test_added_logprobs_and_values_equal_those_of_a_forward(device):
    """The temperature applies, and no tensor keeps a graph."""
    policy, value = (
        load_policy(tiny_model(), ARGS, device),
        load_scalar_model(tiny_model(), ARGS, device),
    )
    minibatches = pack_minibatches([[s] for s in samples()], range(len(samples())), 2, 20, device)
    assert len(minibatches) == 2 and len(minibatches[1]) > 1
    before = [vars(mb).copy() for minibatch in minibatches for mb in minibatch]
    added = with_values(
        with_logprobs(with_logprobs(minibatches, 0.7, old=policy), 1.0, ref=policy), value
    )
    assert [vars(mb) for minibatch in minibatches for mb in minibatch] == before
    minibatches = added
    for mb in (mb for minibatch in minibatches for mb in minibatch):
        with torch.no_grad():
            assert torch.equal(mb.old_logprobs_T, policy(mb, temperature=0.7)[0])
            assert torch.equal(mb.ref_logprobs_T, policy(mb)[0]) and torch.equal(
                mb.values_T, value(mb)
            )
        assert not any(x.requires_grad for x in (mb.old_logprobs_T, mb.ref_logprobs_T, mb.values_T))
    assert not torch.equal(mb.old_logprobs_T, mb.ref_logprobs_T)
    policy.reshard(), value.reshard()


def store(data, load, folder, dtype="auto", path=None, adapter=None) -> list[float]:
    args = TrainArgs(dtype=dtype, pack_tokens=40, adapter=adapter)
    parts = [[[sample] for sample in data[:1]], [[sample] for sample in data[1:]]]
    scored = store_reference_logps(parts, path or tiny_model(), load, folder, args)
    return torch.cat(scored)[:, 0].tolist()


def never():
    raise AssertionError("the file of the first time was not used")


def test_stored_logprobs_are_completion_sums_and_computed_once(tmp_path, device):
    data, policy = samples(), load_policy(tiny_model(), ARGS, device, trainable=False)
    first = store(data, lambda: policy, tmp_path)
    for sample, logp in zip(data, first, strict=True):
        (mb,) = pack([sample], 100, device)
        with torch.no_grad():
            assert logp == pytest.approx(mb.sequence_sums(policy(mb)[0]).item(), abs=1e-4)
    assert store(data, never, tmp_path) == first and not list(tmp_path.glob("*.tmp"))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = dict(peft_type="LORA", r=1, lora_alpha=1, target_modules="all-linear")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").touch()
    for change in (
        lambda: store(data[:-1], never, tmp_path),
        lambda: store(data, never, tmp_path, dtype="bfloat16"),
        lambda: store(data, never, tmp_path, path=str(tmp_path)),
        lambda: store(data, never, tmp_path, adapter=str(adapter)),
    ):
        with pytest.raises(AssertionError, match="was not used"):
            change()
    for name, value in (("ids", 7), ("loss_mask", False)):
        kept = getattr(data[2], name)[:]
        getattr(data[2], name)[-1] = value
        with pytest.raises(AssertionError, match="was not used"):
            store(data, never, tmp_path)
        setattr(data[2], name, kept)
    assert store(data, never, tmp_path) == first


@pytest.mark.parametrize("text", ["{", "[]", '{"logps": []}', "null", "short", "digit"])
def test_damaged_logprob_file_is_refused_by_name(text, tmp_path, device):
    data, file = samples(2), tmp_path / "reference_logps.json"
    if text == "short":
        policy = load_policy(tiny_model(), ARGS, device, trainable=False)
        store(data, lambda: policy, tmp_path)
        stored = json.loads(file.read_text())
        text = json.dumps(stored | dict(logps=stored["logps"][:1]))
    if text == "digit":
        policy = load_policy(tiny_model(), ARGS, device, trainable=False)
        store(data, lambda: policy, tmp_path)
        text = file.read_text().replace(".", ".1", 1)
    file.write_text(text)
    with pytest.raises(ValueError, match="reference_logps.json is damaged; delete it: "):
        store(data, never, tmp_path)
