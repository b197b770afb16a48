"""A policy with images has the numbers of transformers' whole model, packed or alone."""

import pytest
import torch

from common.config.groups import TrainArgs
from common.model.policy import load_policy
from common.packs.packing import pack_groups
from common.text.encode import Encoder
from common.text.rows import encode_each, load_rows
from common.text.tokenizer import load_tokenizer
from extras.images.reader import Idefics3Reader
from extras.images.tests.checkpoints import whole_logits
from extras.images.tower import Images
from sft import Args


def loaded(path, pictures, device, **flags):
    """Return the flags, the samples of the pictures and the policy."""
    args = Args(model=str(path), dataset=[str(pictures)], **dict(vision="frozen") | flags)
    tokenizer = load_tokenizer(str(path), args)
    encoder = Encoder(tokenizer, args, image_args=args)
    rows = load_rows("--dataset", str(pictures), "train", TrainArgs())
    encode = lambda row: encoder.sft(row, ("prompt", "completion"))[0]  # noqa: E731
    samples = [sample for _, sample in encode_each(rows, encode, "error")]
    return args, samples, load_policy(str(path), args, device, image_args=args)


def whole_model_logprobs(path, sample) -> torch.Tensor:
    logprobs_TV = whole_logits(path, sample.ids, sample.images)[:-1].log_softmax(-1)
    return logprobs_TV.gather(-1, torch.tensor(sample.ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("family", ["idefics3", "smolvlm", "qwen3_vl", "qwen3_5"])
def test_packed_logprobs_are_those_of_the_whole_model(family, checkpoints, pictures, device):
    path = checkpoints(family)
    _, samples, policy = loaded(path, pictures, device)
    (mb,) = pack_groups([[sample] for sample in samples], 2048, device)
    with torch.no_grad():
        packed_T = policy(mb).logprobs_T
    expected = [whole_model_logprobs(path, samples[i]) for i in mb.index_N.tolist()]
    torch.testing.assert_close(packed_T, torch.cat(expected), atol=1e-5, rtol=0)


def test_gradient_of_a_pack_is_that_of_its_sequences(checkpoints, pictures, device):
    """The tower is trained too, and prefixes with images are shared."""
    path = checkpoints("qwen3_vl")
    _, samples, policy = loaded(path, pictures, device, vision="train")
    samples = [samples[1], samples[1], samples[3]]
    gradients = []
    for share_prefix, groups in ((0, [[s] for s in samples]), (1, [samples])):
        policy.zero_grad()
        for mb in pack_groups(groups, 300, device, share_prefix, together=False):
            logprobs_T = policy(mb).logprobs_T
            (logprobs_T * mb.loss_mask_T).sum().backward()
        gradients.append({n: p.grad.full_tensor() for n, p in policy.named_parameters()})
    one, other = gradients
    assert one.keys() == other.keys() and any("vision" in n or "visual" in n for n in one)
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=2e-5, rtol=1e-3)
        assert one[name].abs().max() > 0 or "patch_embed" not in name


def test_model_that_ignores_images_is_refused(checkpoints, pictures, device, monkeypatch):
    """The check at load notices a blind model, and one whose images reach other sequences."""
    path = checkpoints("idefics3")
    features = Idefics3Reader.features

    def blind(self, tower, pixels):
        found = features(self, tower, pixels)
        return found._replace(embeds=0 * found.embeds)

    with monkeypatch.context() as patch:
        patch.setattr(Idefics3Reader, "features", blind)
        with pytest.raises(ValueError, match="another image does not change the log-probs"):
            loaded(path, pictures, device)
    inputs = Images.inputs

    def mixed(self, tokens):
        found = inputs(self, tokens)
        if "inputs_embeds" in found:  # the pack has an image
            found["inputs_embeds"] = found["inputs_embeds"] + found["inputs_embeds"].mean()
        return found

    monkeypatch.setattr(Images, "inputs", mixed)
    with pytest.raises(
        ValueError, match="an image of one packed sequence changes another sequence"
    ):
        loaded(path, pictures, device)
