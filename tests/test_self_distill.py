"""self_distill.py: hints and the pairs of completions, the teacher's log-probs, gradients against
naive code, and a teacher that moves."""

import copy
import math
from functools import partial

import pytest
import torch
from helpers import metrics, write
from safetensors.torch import load_file

import self_distill
from common.config.groups import TrainArgs
from common.metrics.meter import Meter
from common.model.distill import OwnTeacher, Teacher
from common.model.loading import whole
from common.model.policy import load_policy, load_reference, move_towards
from common.model.tiny import tiny_model
from common.objectives.divergence import DIVERGENCES
from common.packs.packing import pack_minibatches, split_pairs
from common.packs.sample import Completion
from common.text.encode import Encoder
from common.text.hints import hint_filler, hinted_prompt
from common.text.tokenizer import load_tokenizer
from self_distill import Args, aligned, hints_of, loss, pair


def completion(prompt: list[int], ids: list[int], **fields) -> Completion:
    size = len(prompt) + len(ids)
    mask = [False] * len(prompt) + [True] * len(ids)
    numbers = [0.0] * len(prompt) + [-0.5 - 0.1 * i for i in range(len(ids))]
    versions = [-1] * len(prompt) + [0] * len(ids)
    sample = Completion(prompt + ids, mask, len(prompt), dict(_source="a:1"), **fields)
    sample.rollout_logprobs, sample.versions = numbers[:size], versions
    return sample


# ---- hints ----


def group(*texts: str, feedback: str = "") -> list[Completion]:
    return [completion([1], [2], text=text, feedback=feedback + text) for text in texts]


def test_hint_is_the_next_successful_completion_and_never_the_completion_itself():
    nan = math.nan
    assert hints_of(group(*"abcd"), [1.0, 0.0, 1.0, nan], "sibling") == ["c", "c", "a", "a"]
    assert hints_of(group(*"abc"), [0.0, 1.0, 0.9], "sibling") == ["b", "", "b"]
    assert hints_of(group(*"ab"), [nan, 0.0], "sibling") == ["", ""]
    assert hints_of(group(*"ab"), [sum([0.1] * 10), 0.0], "sibling") == ["", "a"]


def test_hint_is_feedback_or_a_column():
    both = group("a", "b", feedback="wrong: ")
    assert hints_of(both, [0.0, 1.0], "feedback") == ["wrong: a", "wrong: b"]
    both[0].row |= dict(solution=12, shown=[dict(role="assistant", content="x")])
    for column, text in (("solution", "12"), ("shown", "x"), ("absent", "")):
        assert hints_of(both, [0.0, 1.0], column) == [text] * 2
    rows = [
        dict(prompt="x", solution=None, _source="a:1"),
        dict(prompt="y", solution="1", _source="a:2"),
    ]
    hint_filler("solution", "{prompt} {hint}", rows)
    hint_filler("feedback", "{prompt} {hint}", rows)
    with pytest.raises(
        ValueError, match="^--hint x: no row has a value in this column; the dataset has prom"
    ):
        hint_filler("x", "{prompt} {hint}", rows)
    with pytest.raises(ValueError, match="^--hint: there is none; name a column, sibling or"):
        hint_filler(None, "{prompt} {hint}", rows)
    with pytest.raises(ValueError, match="^a:2: --hint_template: no column x"):
        hint_filler("solution", "{hint} {x}", [rows[1] | dict(x="1"), rows[1]])


def test_hint_enters_the_text_or_the_last_message_of_the_user():
    tokenizer = load_tokenizer(tiny_model())
    encoder = Encoder(tokenizer, Args())
    row = dict(_source="a:1", level=3, prompt="1+1=")
    fill = hint_filler("feedback", "{hint};{level};{prompt}", [row])
    ids = hinted_prompt(encoder, "prompt", fill, row, "{2}")
    assert tokenizer.decode(ids) == "{2};3;1+1=" and row["prompt"] == "1+1="
    turns = [("user", "1+1="), ("assistant", "3"), ("user", "no"), ("assistant", "so")]
    row["prompt"] = [dict(role=role, content=text) for role, text in turns]
    changed = [*row["prompt"][:2], dict(role="user", content="2;3;no"), row["prompt"][3]]
    expected = encoder.prompt(row | dict(prompt=changed), ("prompt",))
    assert hinted_prompt(encoder, "prompt", fill, row, "2") == [*expected]
    with pytest.raises(ValueError, match="a:1: --hint needs a prompt with a message from the user"):
        system = dict(_source="a:1", level=3, prompt=[dict(role="system", content="x")])
        hinted_prompt(encoder, "prompt", fill, system, "2")


# ---- pairs ----


def test_pair_has_the_completion_after_both_prompts():
    """The tokens of an environment, 12 here, are not trained."""
    sample = completion([1, 2, 3], [10, 11, 12, 13])
    sample.loss_mask[5] = False
    own, hinted = pair(sample, [7, 8])
    assert own is sample and hinted.ids == [7, 8, 10, 11, 12, 13]
    assert hinted.loss_mask == [False, False, True, True, False, True]
    assert hinted.rollout_logprobs[2:] == sample.rollout_logprobs[3:]
    assert len(hinted.rollout_logprobs) == len(hinted.versions) == 6


def test_hinted_prompt_that_does_not_fit_is_dropped_and_counted(device):
    tokenizer = load_tokenizer(tiny_model())
    args = Args(hint="answer", hint_template="{hint}{prompt}", pack_tokens=20, max_new_tokens=4)
    groups = []
    for hint in ("1" * 10, "1" * 11, None):
        sample = completion(tokenizer("1+1=")["input_ids"], [5, 6])
        sample.row = dict(prompt="1+1=", answer=hint, _source="a:1")
        groups.append([sample])
    meter = Meter()
    rewards_PG = torch.zeros(3, 1)
    rows = [group[0].row for group in groups]
    fill = hint_filler(args.hint, args.hint_template, rows)
    make_prompt = partial(hinted_prompt, Encoder(tokenizer, args), "prompt", fill)
    pairs = self_distill.hinted_pairs(groups, rewards_PG, make_prompt, 99, meter, args)
    assert [len(each) for each in pairs] == [2, 0, 0]
    assert sum(sample.num_targets for sample in pairs[0]) == args.pack_tokens
    assert meter.reduce() == pytest.approx({"hints/used": 1 / 3, "hints/too_long": 1 / 3})
    pairs = self_distill.hinted_pairs(groups, rewards_PG, make_prompt, 15, Meter(), args)
    assert pairs == [[], [], []]


# ---- the objective ----


def packed(device):
    """Return completions with their hinted prompts ([]: no hint), and their micro-batches."""
    generator = torch.Generator().manual_seed(3)

    def draw(n: int) -> list[int]:
        return torch.randint(5, 90, (n,), generator=generator).tolist()

    hinted = [draw(9), [], draw(4), draw(12)]
    made = [completion(draw(n), draw(k)) for n, k in ((3, 5), (4, 2), (6, 1), (2, 7))]
    made[3].loss_mask[4:6] = [False] * 2
    pairs = [pair(s, prompt) if prompt else [] for s, prompt in zip(made, hinted, strict=True)]
    (mbs,) = pack_minibatches(pairs, range(4), 1, 40, device, together=True)
    assert len(mbs) > 1
    return made, hinted, [split_pairs(mb) for mb in mbs]


@pytest.fixture(scope="module")
def policy(small, device) -> OwnTeacher:
    return load_policy(str(small[1]), TrainArgs(dtype="float32"), device, kind=OwnTeacher)


@pytest.fixture
def hf(policy):
    """Return transformers' model with the policy's present weights."""
    plain = copy.deepcopy(policy.hf.config)
    model = type(policy.hf)._from_config(plain, attn_implementation="sdpa")
    model.load_state_dict({n: whole(x.detach()) for n, x in policy.hf.state_dict().items()})
    return model


@pytest.mark.parametrize("kind", ["live", "start"])
def test_gradient_of_the_weights_equals_that_of_plain_forwards(device, policy, hf, kind):
    """The naive side runs both micro-batches one sequence at a time in transformers. The teacher's
    forward with the live weights, which has no graph, must not disturb the backward."""
    args = Args(hint="sibling", reward=("gsm8k",), dtype="float32", teacher=kind)
    made, hinted, halves = packed(device)
    teacher = policy if kind == "live" else load_reference(policy, args, device, kind=Teacher)
    count = sum(own.loss_mask_T.sum() for own, _ in halves)
    for own, copies in halves:
        logits = aligned(teacher.teach(copies), copies.loss_mask_T, own.loss_mask_T)
        out = policy.distill(own, logits, DIVERGENCES[args.divergence])
        loss(out, own.loss_mask_T, count).sum().backward()
    frozen = copy.deepcopy(hf)
    for sample, prompt in zip(made, hinted, strict=True):
        if not prompt:
            continue
        trained = torch.tensor(sample.loss_mask[sample.prompt_length :])
        logp = hf(torch.tensor([sample.ids])).logits[0].log_softmax(-1)
        logp = logp[sample.prompt_length - 1 : -1][trained]
        with torch.no_grad():
            logq = frozen(torch.tensor([prompt + sample.completion_ids])).logits[0].log_softmax(-1)
        logq = logq[len(prompt) - 1 : -1][trained]
        ((logp.exp() * (logp - logq)).sum() / count).backward()
    expected = dict(hf.named_parameters())
    for name, parameter in policy.hf.named_parameters():
        gradient = whole(parameter.grad)
        torch.testing.assert_close(gradient, expected[name].grad, rtol=1e-3, atol=1e-5)
        parameter.grad = None


# ---- the moving teacher ----


def test_teacher_with_adapters_is_the_policy_with_other_adapters(device, small):
    flags = dict(dtype="float32", lora_rank=2, hint="sibling", reward=("gsm8k",))
    args = Args(**flags)
    policy = load_policy(str(small[1]), args, device, kind=OwnTeacher)
    teacher = load_reference(policy, args, device)
    (_, mb), *_ = packed(device)[2]
    first = policy.teach(mb).hidden_TD
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    moved = policy.teach(mb).hidden_TD
    assert not torch.allclose(first, moved)
    assert torch.equal(teacher.teach(mb).hidden_TD, first)
    assert torch.equal(policy.teach(mb).hidden_TD, moved)
    move_towards(teacher, policy, 1.0)
    torch.testing.assert_close(teacher.teach(mb).hidden_TD, moved)


# ---- whole runs ----


@pytest.mark.slow
def test_only_hinted_completions_are_trained_on(online, main, tmp_path, monkeypatch):
    """No completion is right, so there is no hint, and nothing to train on."""
    reward = write(tmp_path / "reward.py", "def never(completion, row): return 0.0")
    packed, original = [], self_distill.split_pairs
    monkeypatch.setattr(self_distill, "split_pairs", lambda mb: packed.append(mb) or original(mb))
    flags = (*online, "--reward", f"{reward}:never", "--hint", "sibling", "--max_steps", 1)
    main("self_distill", *flags, "--output_dir", tmp_path / "run")
    assert [mb.num_samples for mb in packed] == [0, 0], "two minibatches"
    (line,) = metrics(tmp_path / "run")
    assert line["hints/used"] == line["grad_norm"] == line["loss"] == 0


@pytest.mark.slow
def test_moving_teacher_of_a_run_is_a_twentieth_of_the_policy(online, main, small, tmp_path):
    """docs/self_distill.md says q <- 0.95 q + 0.05 pi after each step, which here is one update."""
    flags = (*online, "--hint", "answer", "--max_steps", 1, "--lr", 1e-2, "--save_every", 1)
    main("self_distill", *flags, "--minibatches", 1, "--output_dir", tmp_path)
    (shard,) = (tmp_path / "checkpoints" / "step_000001").glob("*.safetensors")
    weights, start = load_file(shard), load_file(small[1] / "model.safetensors")
    moved = 0
    for name, before in start.items():
        policy, teacher = (weights[f"{kind}.hf.{name}"] for kind in ("model", "moving"))
        torch.testing.assert_close(teacher, 0.95 * before + 0.05 * policy, rtol=1e-5, atol=1e-7)
        moved += int(not torch.equal(before, policy))
    assert moved > len(start) / 2
