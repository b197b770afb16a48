"""self_distill.py: hints and the pairs of completions, the teacher's log-probs, gradients beside
naive code, and a moving teacher."""

import copy
import json
import math
from functools import partial

import pytest
import torch
from in_process import REWARD
from model.test_policy import whole
from torch import nn

import self_distill
from common.config.groups import TrainArgs
from common.data.encode import Encoder
from common.data.packing import pack_minibatches
from common.data.sample import Completion
from common.metrics.meter import Meter
from common.model.distill import OwnTeacher, Teacher, compare
from common.model.hub import load_tokenizer
from common.model.logprobs import Logits
from common.model.policy import load_policy, load_reference, move_towards
from common.model.tiny import tiny_model
from common.objectives.divergence import DIVERGENCES
from common.rollout.hints import divide, hint_filler, hinted_prompt
from self_distill import Args, aligned, hints_of, loss, pair


def completion(prompt: list[int], ids: list[int], **fields) -> Completion:
    size = len(prompt) + len(ids)
    mask = [False] * len(prompt) + [True] * len(ids)
    numbers = [0.0] * len(prompt) + [-0.5 - 0.1 * i for i in range(len(ids))]
    versions = [-1] * len(prompt) + [0] * len(ids)
    sample = Completion(prompt + ids, mask, len(prompt), dict(_source="a:1"), **fields)
    sample.rollout_logprobs, sample.versions = numbers[:size], versions
    return sample


SOME_DIGITS = """

def some_digits(completion, row):
    return float(digits(completion, row) > 0.1)
"""


# ---- hints ----


def group(*texts: str, feedback: str = "") -> list[Completion]:
    return [completion([1], [2], text=text, feedback=feedback + text) for text in texts]


def test_hint_is_the_next_successful_completion_and_never_the_completion_itself():
    nan = math.nan
    assert hints_of(group(*"abcd"), [1.0, 0.0, 1.0, nan], "sibling") == ["c", "c", "a", "a"]
    assert hints_of(group(*"abc"), [0.0, 1.0, 0.9], "sibling") == ["b", "", "b"]
    assert hints_of(group(*"ab"), [nan, 0.0], "sibling") == ["", ""]


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
    assert hinted_prompt(encoder, "prompt", fill, row, "2") == expected
    with pytest.raises(ValueError, match="a:1: --hint needs a prompt with a message from the user"):
        system = dict(_source="a:1", level=3, prompt=[dict(role="system", content="x")])
        hinted_prompt(encoder, "prompt", fill, system, "2")


# ---- pairs ----


def test_pair_has_the_completion_after_both_prompts():
    """The tokens of an environment, 12 here, are not trained."""
    sample = completion([1, 2, 3], [10, 11, 12, 13])
    sample.loss_mask[5] = False
    own, hinted = pair(sample, [7, 8])
    assert own.ids is sample.ids and own.weights == [0, 0, 0, 1, 1, 0, 1]
    assert hinted.ids == [7, 8, 10, 11, 12, 13] and hinted.weights == [0, 0, 1, 1, 0, 1]
    assert hinted.loss_mask == [False, False, True, True, False, True]
    assert hinted.rollout_logprobs[2:] == sample.rollout_logprobs[3:]
    own, stub = pair(sample, [])
    assert not any(own.weights + stub.weights) and own.loss_mask == sample.loss_mask
    assert stub.ids == [3, 10] and len(stub.rollout_logprobs) == len(stub.versions) == 2


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
    assert [any(own.weights) for own, _ in pairs] == [True, False, False]
    assert sum(sample.num_targets for sample in pairs[0]) == args.pack_tokens
    assert meter.reduce() == pytest.approx({"hints/used": 1 / 3, "hints/too_long": 1 / 3})
    pairs = self_distill.hinted_pairs(groups, rewards_PG, make_prompt, 15, Meter(), args)
    assert not any(any(own.weights) for own, _ in pairs)


# ---- the objective ----


def packed(device):
    """Return completions with their hinted prompts, [] for one without, and their micro-batches."""
    generator = torch.Generator().manual_seed(3)

    def draw(n: int) -> list[int]:
        return torch.randint(5, 90, (n,), generator=generator).tolist()

    hinted = [draw(9), [], draw(4), draw(12)]
    made = [completion(draw(n), draw(k)) for n, k in ((3, 5), (4, 2), (6, 1), (2, 7))]
    made[3].loss_mask[4:6] = [False] * 2
    pairs = [pair(s, prompt) for s, prompt in zip(made, hinted, strict=True)]
    (mbs,) = pack_minibatches(pairs, range(4), 1, 40, device, together=True)
    assert len(mbs) > 1
    return made, hinted, [divide(mb) for mb in mbs]


@pytest.fixture(scope="module")
def policy(small, device) -> OwnTeacher:
    return load_policy(str(small[1]), TrainArgs(dtype="float32"), device, kind=OwnTeacher)


@pytest.fixture
def hf(policy):
    """Return the model of transformers with the policy's present weights."""
    plain = copy.deepcopy(policy.hf.config)
    model = type(policy.hf)._from_config(plain, attn_implementation="sdpa")
    model.load_state_dict({n: whole(x.detach()) for n, x in policy.hf.state_dict().items()})
    return model


def test_teacher_logprobs_equal_a_plain_forward_of_the_hinted_sequence(device, policy, hf):
    made, hinted, halves = packed(device)
    seen = 0
    for own, copies in halves:
        teacher = aligned(policy.teach(copies), copies.weights_T > 0, own.weights_T > 0)
        out = policy.distill(own, teacher)
        for n, index in enumerate(own.index_N.tolist()):
            sample, prompt = made[index], hinted[index]
            here = (own.sequence_ids_T == n) & (own.weights_T > 0)
            if not prompt:
                assert not here.any()
                continue
            ids = torch.tensor([prompt + sample.completion_ids])
            logp = hf(ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            trained = torch.tensor(sample.loss_mask[sample.prompt_length :])
            taken = logp.gather(1, ids[0, len(prompt) :, None])[trained, 0]
            torch.testing.assert_close(out.teacher_logprobs_T[here], taken, rtol=1e-4, atol=1e-5)
            seen += 1
    assert seen == 3
    policy.reshard()


def naive_divergence(name: str, logp, logq):
    p, q = logp.exp(), logq.exp()
    if name == "reverse_kl":
        return (p * (logp - logq)).sum()
    if name == "forward_kl":
        return (q * (logq - logp)).sum()
    m = (q + p) / 2
    return ((q * (logq - m.log())).sum() + (p * (logp - m.log())).sum()) / 2


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_value_and_gradient_equal_naive_code(device, divergence):
    """In float64, over two micro-batches; the naive code goes through the samples' own lists."""
    made, hinted, halves = packed(device)
    generator = torch.Generator().manual_seed(1)
    D, V = 6, 90
    head = torch.randn(V, D, generator=generator, dtype=torch.float64)
    states = {
        i: torch.randn(len(s.ids), D, generator=generator).double() for i, s in enumerate(made)
    }
    taught = {
        i: torch.randn(len(h) + len(s.ids) - s.prompt_length, D, generator=generator).double()
        for i, (s, h) in enumerate(zip(made, hinted, strict=True))
    }

    def run_ours(head, states):
        hinted_tokens = sum(own.weights_T.sum() for own, _ in halves)
        total = 0.0
        for own, copies in halves:
            index = own.index_N.tolist()
            hidden = torch.cat([states[i][:-1] for i in index])
            stubs = torch.zeros(1, D).double()
            others = torch.cat([taught[i][:-1] if hinted[i] else stubs for i in index])
            hinted_T = own.weights_T > 0
            teacher = aligned(Logits(others, head.detach()), copies.weights_T > 0, hinted_T)
            out = compare(
                Logits(hidden, head), teacher, own.targets_T, 1.0, DIVERGENCES[divergence]
            )
            share_T = loss(out, hinted_T, hinted_tokens)
            total = total + share_T.sum()
        return total

    def run_naive(head, states):
        kl, hinted_tokens = 0.0, 0
        for i, (sample, prompt) in enumerate(zip(made, hinted, strict=True)):
            start = sample.prompt_length
            for k in range(len(sample.completion_ids)):
                if prompt and sample.loss_mask[start + k]:
                    logp = (states[i][start + k - 1] @ head.T).log_softmax(-1)
                    logq = (taught[i][len(prompt) + k - 1] @ head.detach().T).log_softmax(-1)
                    kl = kl + naive_divergence(divergence, logp, logq)
                    hinted_tokens += 1
        return kl / hinted_tokens

    found = []
    for function in (run_ours, run_naive):
        leaves = [head.clone().requires_grad_()]
        own_states = {i: x.clone().requires_grad_() for i, x in states.items()}
        value = function(leaves[0], own_states)
        found.append(
            [
                value,
                *torch.autograd.grad(
                    value, leaves + list(own_states.values()), materialize_grads=True
                ),
            ]
        )
    for ours, naive in zip(*found, strict=True):
        torch.testing.assert_close(ours, naive, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["live", "start"])
def test_gradient_of_the_weights_equals_that_of_plain_forwards(device, policy, hf, kind):
    """The no-grad forward of a live teacher changes nothing in the backward pass."""
    args = Args(hint="sibling", reward=("gsm8k",), dtype="float32", teacher=kind)
    made, hinted, halves = packed(device)
    teacher = policy if kind == "live" else load_reference(policy, args, device, kind=Teacher)
    count = sum(own.weights_T.sum() for own, _ in halves)
    for own, copies in halves:
        logits = aligned(teacher.teach(copies), copies.weights_T > 0, own.weights_T > 0)
        out = policy.distill(own, logits, DIVERGENCES[args.divergence])
        (out.divergence_T * own.weights_T / count).sum().backward()
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


def test_average_moves_towards_the_policy_by_the_rate():
    frozen, policy = nn.Linear(2, 2), nn.Linear(2, 2)
    policy.bias.requires_grad_(False)  # not trained
    start = {name: x.detach().clone() for name, x in frozen.named_parameters()}
    move_towards(frozen, policy, 0.25)
    torch.testing.assert_close(frozen.weight, 0.75 * start["weight"] + 0.25 * policy.weight)
    assert torch.equal(frozen.bias, start["bias"])
    for _ in range(60):
        move_towards(frozen, policy, 0.5)
    torch.testing.assert_close(frozen.weight, policy.weight)


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


@pytest.fixture(scope="module")
def flags(small, tmp_path_factory):
    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    reward.write_text(REWARD + SOME_DIGITS)
    return (
        *small, "--reward", f"{reward}:some_digits", "--max_steps", 3, "--save_every", 2,
        "--prompts_per_step", 4, "--samples_per_prompt", 4, "--minibatches", 2,
        "--epochs_per_rollout", 2, "--temperature", 0.8, "--max_new_tokens", 12, "--lr", 1e-3,
        "--warmup_steps", 0, "--eval_every", 0, "--max_logprob_difference", 1e-4,
        "--engine", "transformers",
    )  # fmt: skip


def test_default_run_without_a_hint_column_is_refused(main, small, tmp_path):
    rows = tmp_path / "a.jsonl"
    rows.write_text(json.dumps(dict(prompt="1+1=", answer="2")) + "\n")
    flags = (*small, "--dataset", rows, "--eval_every", 0, "--output_dir", tmp_path / "run")
    with pytest.raises(ValueError, match="^--hint solution: no row has a value in this column"):
        main("self_distill", *flags, "--reward", "exact_match", "--hint", "solution")


def test_template_is_tried_on_every_row_at_the_start():
    rows = [dict(_source="a:1", prompt="p", x="1"), dict(_source="a:2", prompt="p")]
    hint_filler("x", "{prompt} {hint}", rows)
    with pytest.raises(ValueError, match="^a:2: --hint_template: no column x"):
        hint_filler("x", "{hint} {x}", rows)
