"""Whoever computes a sequence, its owner gets its streams, and the gradient is that of one process."""

import json

import inprocess
import pytest
from helpers import ROOT, assert_close_metrics, run, weights
from hypothesis import given
from hypothesis import strategies as st

from common.parallel.placement import assign, work

main = inprocess.main

LENGTHS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=2), max_size=40)


# ---- assignment ----


@given(LENGTHS, st.integers(1, 5), st.integers(60, 200))
def test_every_group_is_computed_once_whole_and_within_the_room(groups, units, room):
    lengths = {(i % 3, i // 3): group for i, group in enumerate(groups)}
    rows = assign(lengths, units, room)
    assert {len(row) for row in rows} == {units}
    assert sorted(key for row in rows for keys in row for key in keys) == sorted(lengths)
    assert all(sum(sum(lengths[key]) for key in keys) <= room for row in rows for keys in row)


@given(LENGTHS, st.integers(2, 5))
def test_with_room_for_it_ranks_differ_by_one_group_at_most(groups, units):
    lengths = {(0, i): group for i, group in enumerate(groups)}
    (row,) = assign(lengths, units, 10_000)
    works = [sum(work(lengths[key]) for key in keys) for keys in row]
    assert max(works) - min(works) <= max((work(group) for group in groups), default=0) + 1e-9


def test_no_more_rows_than_the_tokens_need():
    lengths = {(0, i): [n] for i, n in enumerate((60, 50, 50, 40, 30, 30, 20, 20))}  # 300: three bins of 100 are full
    assert len(assign(lengths, 1, 100)) == 3 and len(assign(lengths, 2, 100)) == 2 and len(assign({}, 4, 100)) == 1


def test_what_does_not_fit_names_the_flag():
    with pytest.raises(ValueError, match="^a sequence of 12 tokens do not fit in --pack_tokens 10$"):
        assign({(0, 0): [12]}, 2, 10)
    with pytest.raises(ValueError, match="^2 sequences that belong together of 12 tokens"):
        assign({(0, 0): [6, 6]}, 2, 10)


# ---- ranks ----

RANKS = """
import json, math, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
import torch, transformers
from pathlib import Path
from common.parallel import distributed
from common.config.groups import TrainArgs
from common.model.policy import load_policy, load_scalar_model
from common.data.packing import Sample, pack, pack_groups
from model.test_policy import LLAMA3_ROPE, small

folder, context, recompute = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "recompute"
device, rank, ranks = distributed.setup(0)
CONFIGS = dict(
    qwen3=transformers.Qwen3Config(**small(num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True)),
    llama=transformers.LlamaConfig(**small(num_attention_heads=4, num_key_value_heads=1, rope_parameters=LLAMA3_ROPE)),
    mistral=transformers.MistralConfig(**small(sliding_window=7, num_key_value_heads=4)),
)
generator = torch.Generator().manual_seed(0)
samples, advantages = [], torch.tensor([(i * 7 % 5 - 2) / 2 for i in range(10)])
for i, n in enumerate((18, 41, 41, 6, 64, 2, 150, 33, 12, 77)):  # more than pack_tokens
    ids = torch.randint(3, 97, (n,), generator=generator).tolist()
    samples.append(Sample(ids, [j > n // 3 for j in range(n)]))

def loss_of(logprobs_T, entropy_T, mask_T, means_T, advantages_T):
    "Sums over tokens, and over sequences of a function of their means."
    return ((-logprobs_T - 0.1 * entropy_T - (means_T + 4.6).exp() * advantages_T) * mask_T).sum()

found = {}
for name, config in CONFIGS.items():
    path = folder / name
    if distributed.is_main():
        torch.manual_seed(1)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    distributed.barrier()
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    expected = 0.0
    for s, advantage in zip(samples, advantages.tolist(), strict=True):
        logp_TV = plain(torch.tensor([s.ids[:-1]]), use_cache=False).logits[0].log_softmax(-1)
        logprobs_T = logp_TV.gather(-1, torch.tensor(s.ids[1:])[:, None])[:, 0]
        mask_T = torch.tensor(s.loss_mask[1:])
        mean = (logprobs_T * mask_T).sum() / mask_T.sum().clamp(min=1)
        loss = loss_of(logprobs_T, -(logp_TV.exp() * logp_TV).sum(-1), mask_T, mean, advantage)
        loss.backward()
        expected += loss.item()
    args = TrainArgs(dtype="float32", context_ranks=context, activation_checkpointing=recompute)
    policy = load_policy(str(path), args, device)
    packs, total = pack(samples[rank::ranks], 150 // context + 5, device), 0.0
    for mb in packs:
        logprobs_T, entropy_T, correct_T, collision_T = policy(mb)
        assert correct_T.dtype == torch.bool and len(correct_T) == len(mb.targets_T)
        means_T = mb.sequence_mean_T(logprobs_T)
        loss = loss_of(logprobs_T, entropy_T, mb.loss_mask_T, means_T, mb.on_tokens(advantages[rank::ranks]))
        (loss * ranks).backward()
        total += loss.item()
    norm = max(p.grad.abs().max().item() for p in plain.parameters())
    worst = 0.0
    for name_, p in plain.named_parameters():
        mine = policy.hf.get_parameter(name_).grad.full_tensor()
        worst = max(worst, (mine - p.grad).abs().max().item() / norm)
    computed = [len(mb.computed.targets_T) for mb in packs]
    pairs = [[a, b] for a, b in zip(samples[rank::ranks][::2], samples[rank::ranks][1::2])]
    scalar = load_scalar_model(str(path), args, device)
    for mb in pack_groups(pairs, 300, device):
        values_T = scalar(mb)
        assert len(values_T) == len(mb.targets_T) and values_T.requires_grad
    found[name] = dict(loss=abs(float(distributed.all_sum(total)) / expected - 1), gradient=worst)
    found[name]["computed"] = distributed.gather_objects(computed)
    found[name]["owned"] = distributed.gather_objects([len(mb.targets_T) * bool(mb.samples) for mb in packs])
if distributed.is_main():
    (folder / "found.json").write_text(json.dumps(found))
distributed.cleanup()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, context, recompute", [(2, 2, "recompute"), (3, 1, "no"), (4, 2, "no"), (4, 4, "recompute")]
)
def test_the_gradient_is_that_of_plain_transformers(ranks, context, recompute, tmp_path):
    """Whoever computes: losses of tokens and of whole sequences; with one head of keys, with windows, with the
    recomputation of blocks, and with a sequence that fits on no single rank."""
    (tmp_path / "ranks.py").write_text(RANKS)
    run(ranks, tmp_path / "ranks.py", ROOT, tmp_path, context, recompute)
    for name, found in json.loads((tmp_path / "found.json").read_text()).items():
        assert found["loss"] < 1e-6 and found["gradient"] < 1e-5, (name, found)
        for tokens in zip(*found["computed"], strict=True):  # of a micro-batch, on each rank
            assert max(tokens) <= 150 // context + 5
            if context == ranks:
                assert len(set(tokens)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, ranks, flags, both",
    [
        ("dpo", 4, ("--context_ranks", 2, "--pack_tokens", 40), ("--batch_size", 16, "--reference_logprobs", "online")),
        ("ppo", 4, ("--context_ranks", 2, "--pack_tokens", 100), ("--samples_per_prompt", 4)),
        (
            "grpo",
            3,
            ("--context_ranks", 2, "--rollout_ranks", 1, "--max_staleness", 0, "--pack_tokens", 100),
            ("--samples_per_prompt", 4),
        ),
        (
            "grpo",
            4,
            ("--context_ranks", 2, "--shard_ranks", 2, "--offload", "all", "--pack_tokens", 100),
            ("--samples_per_prompt", 4, "--lora_rank", 4, "--beta", 0.1),
        ),
    ],
)
def test_scripts_with_context_ranks(main, script, ranks, flags, both, sums, tmp_path):
    """Two units of two ranks, or one beside a rank that only generates, are one rank; saved and exported like it. Also
    with two copies of a model under adapters that lives on the host."""
    if script == "dpo":  # and what it would take of the whole task
        data = ("--dataset", sums, "--lr", 3e-3, "--warmup_steps", 10, "--beta", 1, "--sft_weight", 1)
    else:
        data = ("--engine", "transformers", "--prompts_per_step", 16)
    steps = ("--max_steps", 2, "--eval_size", 8, "--dtype", "float32", "--save_every", 100, *data, *both)
    main(script, *steps, "--output_dir", tmp_path / "one")
    run(ranks, f"{script}.py", *steps, *flags, "--output_dir", tmp_path / "many")
    assert_close_metrics(tmp_path / "one", tmp_path / "many", ("loss", "grad_norm"), rel=1e-4, floor=0.1)
    one, many = weights(tmp_path / "one"), weights(tmp_path / "many")
    assert all((one[name] - many[name]).abs().max() < 1e-4 for name in one)


def test_context_ranks_that_do_not_divide(device):
    from common.config.groups import TrainArgs
    from common.model.policy import load_policy
    from common.model.tiny import tiny_model

    with pytest.raises(ValueError, match="^--context_ranks 3 does not divide the 4 ranks that train$"):
        TrainArgs(context_ranks=3).check_ranks(4)
    with pytest.raises(ValueError, match="--context_ranks 3 does not divide its 4 attention heads$"):
        load_policy(tiny_model(), TrainArgs(context_ranks=3), device)
