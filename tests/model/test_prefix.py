"""With shared prefixes, the numbers of every token and the gradient of every parameter are those of
whole sequences."""

import random

import pytest
import torch
import transformers
from helpers import samples_of
from hypothesis import given
from hypothesis import strategies as st
from model.checkpoints import ARCHITECTURES, small
from torch import Tensor

from common.model import attention
from common.model.flops import forward_flops
from common.model.policy import PackedModel, Policy, ScalarModel
from common.packs.packing import PackedBatch, pack_groups, pack_minibatches
from common.packs.placement import GroupShape, place_groups
from common.packs.sample import Sample

CPU, VOCABULARY = torch.device("cpu"), 97
SOFTCAPS = dict(
    head_dim=16, sliding_window=7, query_pre_attn_scalar=16, final_logit_softcapping=5.0
)
CONFIGS = dict(
    qwen3=ARCHITECTURES["qwen3"],
    llama=lambda: transformers.LlamaConfig(**small(num_key_value_heads=1)),
    mistral=ARCHITECTURES["mistral"],  # a window
    gemma2=lambda: transformers.Gemma2Config(**small(**SOFTCAPS)),
    experts=ARCHITECTURES["qwen3_moe"],
)
LIMIT = 1e-5  # of float32


def build(name: str, cls: type = Policy) -> PackedModel:
    """Return a model with random weights that are large enough to matter."""
    transformers.AttentionInterface.register("packed", attention.packed_attention)
    auto = transformers.AutoModelForCausalLM
    if cls is not Policy:
        auto = transformers.AutoModelForSequenceClassification
    config = CONFIGS[name]()
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf = auto.from_config(config, attn_implementation="packed", dtype=torch.float32)
        for parameter in hf.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    model = cls(hf, name).train()
    model.compiled = False
    return model


def group(prompt: int, completions: list[int], seed: int = 0) -> list[Sample]:
    """Return samples of random ids that part after `prompt` tokens."""
    draw = random.Random(f"{seed} {prompt} {completions}")
    start = [draw.randrange(3, VOCABULARY) for _ in range(prompt)]
    samples = []
    for i, n in enumerate(completions):
        rest = [draw.randrange(3, VOCABULARY) for _ in range(n - 1)]
        ids = start + [3 + i % (VOCABULARY - 3)] + rest
        samples.append(Sample(ids, [j >= prompt for j in range(prompt + n)]))
    return samples


def tree(seed: int = 0) -> list[Sample]:
    """Return samples that part after 5 tokens, after 9 or 8 of them, and after 8 to 12 tokens of
    each branch."""
    draw = random.Random(seed)
    trunk, left, right, *leaves = (
        [draw.randrange(3, VOCABULARY) for _ in range(n)] for n in (5, 4, 3, 6, 2, 1, 7, 4)
    )
    branches = left, left, right, right, []
    paths = [trunk + branch + leaf for branch, leaf in zip(branches, leaves, strict=True)]
    draw.shuffle(paths)
    return [Sample(ids, [i > 4 for i in range(len(ids))]) for ids in paths]


GROUPS = {
    "one sequence": [group(9, [5])],
    "two": [group(9, [5, 5])],
    "ragged": [group(20, [1, 7, 2, 30, 7, 7, 1, 3])],
    "sixteen": [group(11, [1 + i % 5 for i in range(16)])],
    "a prompt of one token": [group(1, [4, 5, 6])],
    "a prompt of two tokens": [group(2, [4, 5, 6])],
    "identical sequences": [group(6, [8]) * 3],
    "one is the beginning of the others": [
        [Sample(list(range(3, 3 + n)), [True] * n) for n in (12, 8, 20)]
    ],
    "completions of one token": [group(13, [1, 1, 1])],
    "a tree": [tree()],
    "a tree on a trunk": [tree(0) + tree(0)[:2], tree(1)],
    "several": [
        group(20, [6, 2, 9]), group(5, [40]), group(33, [3, 3, 3, 3]), group(1, [2, 2]),
        group(17, [25, 1]),
    ],
}  # fmt: skip


def packs_of(groups: list[list[Sample]], share_prefix: int) -> list[PackedBatch]:
    return pack_groups(groups, 100_000, CPU, share_prefix=share_prefix)


def loss_of(model: Policy, mb: PackedBatch, of_samples: list[float]) -> Tensor:
    """Return a loss of the trained tokens, of whole sequences and of entropies; and of every token,
    those of prompts too, by its position and the number of its sample."""
    logprobs_T, entropy_T, *_ = model(mb, temperature=0.8)
    sums_N = mb.sequence_sums(logprobs_T)
    of_samples = torch.tensor(of_samples).view(mb.shape_of_samples)
    numbers_T = mb.on_tokens(of_samples)
    weights_T = torch.cos(0.1 * mb.targets_T + mb.position_ids_T + numbers_T) * bool(mb.num_samples)
    trained = ((logprobs_T.exp() - 0.1 * entropy_T) * mb.loss_mask_T).sum()
    return trained + (logprobs_T * weights_T).sum() + (sums_N**2).sum() / 100


def results(model: Policy, packs: list[PackedBatch]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the loss, the log-probs of each sample, and the gradients."""
    model.zero_grad()
    numbers = [float(i) for i in range(sum(mb.num_samples for mb in packs))]
    loss = sum(loss_of(model, mb, numbers) for mb in packs)
    loss.backward()
    logprobs = {}
    for mb in packs:
        sizes = [sample.num_targets for sample in samples_of(mb)]
        with torch.no_grad():
            of_samples = model(mb, temperature=0.8)[0].split(sizes)
        logprobs |= dict(zip(mb.index_N.tolist(), of_samples, strict=True))
    gradients = [p.grad.clone() for p in model.parameters()]
    return loss.detach(), [logprobs[i] for i in sorted(logprobs)], gradients


def error(found, expected) -> float:
    """Return the largest error: of the loss and the gradients, relative; of log-probs, in tens of
    nats."""
    (loss, logprobs, gradients), (its_loss, its_logprobs, its_gradients) = found, expected
    largest = max(y.abs().max() for y in its_gradients)
    errors = [abs(loss / its_loss - 1)]
    errors += [(x - y).abs().max() / 10 for x, y in zip(logprobs, its_logprobs, strict=True)]
    pairs = zip(gradients, its_gradients, strict=True)
    return max(errors + [(x - y).abs().max() / largest for x, y in pairs])


# ---- loss and gradients ----


@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_and_gradients_are_those_of_whole_sequences(name):
    """Every shape of group with a window, which is the hardest; a few with the other families."""
    model = build(name)
    for case in GROUPS if name == "mistral" else ("ragged", "a tree", "several"):
        found, expected = (results(model, packs_of(GROUPS[case], share)) for share in (1, 0))
        assert error(found, expected) < LIMIT, case
    model.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    assert error(results(model, packs_of(GROUPS[case], 1)), expected) < LIMIT, "recomputed"


def test_scalar_models():
    model, found = build("qwen3", ScalarModel), []
    for share_prefix in (1, 0):
        (mb,) = packs_of(GROUPS["several"], share_prefix)
        model.zero_grad()
        values_T = model(mb)
        (values_T * torch.cos(mb.targets_T + 0.1 * mb.position_ids_T)).sum().backward()
        ends = values_T[mb.ends_N].detach()[mb.index_N.argsort()]
        found.append((torch.ones(()), [ends], [p.grad.clone() for p in model.parameters()]))
    assert error(*found) < LIMIT


# ---- packs ----


def test_tokens_of_the_prompt_are_computed_once():
    (mb,) = packs_of([group(20, [6, 2, 9])], 1)
    tokens = mb.model_tokens
    # 20 tokens of the prompt are equal: 19 shared targets. The 20th is read by each of the three.
    assert len(tokens.targets_T) == 19 + 6 + 2 + 9 and len(mb.targets_T) == 3 * 19 + 6 + 2 + 9
    assert tokens.offsets == [0, 25, 27, 36]
    assert tokens.position_ids_T.tolist() == [*range(25), *range(19, 21), *range(19, 28)]
    assert (tokens.targets_T[tokens.places_T] == mb.targets_T).all()
    assert (tokens.input_ids_T[tokens.places_T] == mb.input_ids_T).all()
    assert (tokens.position_ids_T[tokens.places_T] == mb.position_ids_T).all()
    assert tokens.keys.lengths == [25, 21, 28]
    assert tokens.keys.cu_seqlens_N1.tolist() == [0, 25, 46, 74]


def test_branches_of_a_tree_are_computed_once():
    """Lexical order makes neighbours of the samples that share most, whatever their order in the
    group."""
    (mb,) = pack_groups([tree()], 100_000, CPU, together=False, share_prefix=1)
    assert len(mb.model_tokens.targets_T) == 5 + 4 + 3 + 6 + 2 + 1 + 7 + 4 - 1
    # only the left branch has 9 ids
    (mb,) = pack_groups([tree()], 100_000, CPU, together=False, share_prefix=9)
    assert len(mb.model_tokens.targets_T) == len(mb.targets_T) - 8


def test_prefixes_are_shared_only_if_they_are_long_enough():
    assert packs_of([group(29, [5, 5])], 30)[0].compact is None
    assert packs_of([group(30, [5, 5])], 30)[0].compact.offsets == [0, 34, 39]
    assert packs_of([group(30, [5, 5])], 0)[0].compact is None


def test_flops_are_those_of_computed_tokens_and_pairs():
    config = ARCHITECTURES["llama"]()
    (mb,) = packs_of([group(20, [6, 2, 9])], 1)
    pairs = 19 * 20 / 2 + sum(n * 19 + n * (n + 1) / 2 for n in (6, 2, 9))
    attention = 4 * config.hidden_size * config.num_hidden_layers * pairs
    assert forward_flops(config, 1000, mb.model_tokens) == 2 * 1000 * (19 + 17) + attention


SIZES = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=9)), max_size=6
)


@given(SIZES, st.integers(90, 300))
def test_every_token_is_found_and_packs_have_room(sizes, room):
    groups = [group(prompt, completions, seed) for seed, (prompt, completions) in enumerate(sizes)]
    packs = pack_groups(groups, room, CPU, together=False, share_prefix=1)
    packed = [id(sample) for mb in packs for sample in samples_of(mb)]
    assert sorted(packed) == sorted(id(sample) for samples in groups for sample in samples)
    for mb in packs:
        assert len(mb.model_tokens.targets_T) <= room
        for name in ("input_ids_T", "targets_T", "position_ids_T") if mb.compact else ():
            assert (getattr(mb.model_tokens, name)[mb.compact.places_T] == getattr(mb, name)).all()


def test_group_that_does_not_fit_is_computed_in_parts(monkeypatch):
    model, groups = build("qwen3"), [group(20, [9, 8, 7, 6, 5, 30, 2, 1])]
    (packs,) = pack_minibatches(groups, range(1), 1, 60, CPU, share_prefix=1)
    assert len(packs) > 1 and any(mb.compact for mb in packs)
    whole = sum(sample.num_targets for sample in groups[0])
    assert sum(len(mb.model_tokens.targets_T) for mb in packs) < whole
    assert error(results(model, packs), results(model, packs_of(groups, 0))) < LIMIT
    with pytest.raises(ValueError, match="8 sequences to keep together take 104 tokens"):
        pack_minibatches(groups, range(1), 1, 60, CPU, share_prefix=1, together=True)


# ---- placement ----


def shape_of(prefix: int, suffixes: list[int]) -> GroupShape:
    return GroupShape([prefix + n for n in suffixes], [0, *[prefix] * (len(suffixes) - 1)])


@given(SIZES, st.integers(90, 300), st.integers(1, 4))
def test_parts_are_the_groups_and_fit(sizes, room, num_bins):
    groups = [shape_of(*size) for size in sizes]
    ranks = [groups[rank::num_bins] for rank in range(num_bins)]
    keyed, rows = place_groups(ranks, num_bins, room, together=False)
    for rank, before in enumerate(ranks):
        after = [part for (owner, _), part in keyed.items() if owner == rank]
        lengths = [[n for part in parts for n in part.lengths] for parts in (before, after)]
        assert lengths[0] == lengths[1]
    assert sorted(key for row in rows for keys in row for key in keys) == sorted(keyed)
    assert {len(row) for row in rows} == {num_bins}
    assert all(sum(keyed[key].size for key in keys) <= room for row in rows for keys in row)


@given(st.integers(1, 60), st.lists(st.integers(1, 60), min_size=2, max_size=16))
def test_group_needs_no_more_room_than_its_sequences(prefix, suffixes):
    shape = shape_of(prefix, suffixes)
    assert shape.tokens <= shape.size <= sum(shape.lengths)


def test_few_groups_are_divided_among_many_ranks():
    """One prompt for each of four ranks, one with long completions: whole groups would make three
    ranks wait."""
    ranks = [[GroupShape([120 + n] * 8, [0, *[100] * 7])] for n in (900, 30, 30, 30)]
    parts, (row,) = place_groups(ranks, 4, 10_000, together=False)
    costs = [sum(parts[key].cost for key in keys) for keys in row]
    assert (0, 1) in parts and max(costs) < 0.6 * ranks[0][0].cost
