"""For every assignment of sequences to ranks, the owner gets the streams, and the gradient is that
of one process."""

import json

import pytest
from helpers import ROOT, assert_close_metrics
from hypothesis import given
from hypothesis import strategies as st
from processes import run

from common.packs.placement import GroupShape, place_groups

LENGTHS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=2), max_size=40)


# ---- assignment ----


def placed(groups: list[list[int]], num_bins: int, max_tokens: int):
    """Place groups of three ranks whose sequences have these lengths and stay together."""
    shapes = [GroupShape(lengths, [0] * len(lengths)) for lengths in groups]
    return place_groups([shapes[rank::3] for rank in range(3)], num_bins, max_tokens, together=True)


@given(LENGTHS, st.integers(1, 5), st.integers(60, 200))
def test_every_group_is_in_one_bin_within_the_limit(groups, num_bins, max_tokens):
    shapes, rows = placed(groups, num_bins, max_tokens)
    assert sorted(shapes) == sorted((i % 3, i // 3) for i in range(len(groups)))
    assert sorted(key for row in rows for keys in row for key in keys) == sorted(shapes)
    sizes = [sum(shapes[key].size for key in keys) for row in rows for keys in row]
    assert {len(row) for row in rows} == {num_bins} and max(sizes) <= max_tokens


@given(LENGTHS, st.integers(2, 5))
def test_costs_of_bins_without_a_limit_differ_by_at_most_one_group(groups, num_bins):
    shapes, (row,) = placed(groups, num_bins, 10_000)
    costs = [sum(shapes[key].cost for key in keys) for keys in row]
    largest = max((shape.cost for shape in shapes.values()), default=0)
    assert max(costs) - min(costs) <= largest + 1e-9


def test_number_of_rows_is_minimal():
    groups = [[n] for n in (60, 50, 50, 40, 30, 30, 20, 20)]  # 300: three full bins of 100
    assert [len(placed(groups, bins, 100)[1]) for bins in (1, 2)] == [3, 2]
    assert len(placed([], 4, 100)[1]) == 1


def test_oversized_group_is_refused_and_names_the_flag():
    for lengths, words in (
        ([12], "a sequence has 12 tokens; raise --pack_tokens or"),
        ([6, 6], "2 sequences to keep together take 12 tokens"),
    ):
        with pytest.raises(ValueError, match=f"^--pack_tokens 10: {words}"):
            placed([lengths], 2, 10)


# ---- ranks ----

RANKS = """
import json, math, sys
import torch, transformers
from pathlib import Path
from common.parallel import distributed
from common.config.groups import TrainArgs
from common.model.policy import load_policy, load_scalar_model
from common.packs.packing import pack_groups
from common.packs.sample import Sample
from common.objectives.reduction import sequence_mean, sequence_sum
from model.checkpoints import LLAMA3_ROPE, small

folder, context, recompute = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "recompute"
shortest = int(sys.argv[4])
device, rank, ranks = distributed.setup(0)
HEADS = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1)
CONFIGS = dict(
    qwen3=transformers.Qwen3Config(
        **small(num_hidden_layers=2, num_attention_heads=8, tie_word_embeddings=True)
    ),
    llama=transformers.LlamaConfig(**small(**HEADS, rope_parameters=LLAMA3_ROPE)),
    gpt_oss=transformers.GptOssConfig(  # sinks, of which a rank needs those of its heads
        **small(**HEADS, head_dim=8, sliding_window=7), num_local_experts=2, num_experts_per_tok=1
    ),
)
generator = torch.Generator().manual_seed(0)
groups = []

def random_ids(n):
    return torch.randint(3, 97, (n,), generator=generator).tolist()

# More than pack_tokens; some groups begin with equal tokens.
for start, rests in (
    (0, [18]), (20, [21, 1, 21]), (6, [1, 3]), (50, [14, 14]), (0, [2]), (9, [150, 24, 3, 90, 68]),
):
    begin = random_ids(start)
    group = []
    for rest in rests:
        ids = begin + random_ids(rest)
        group.append(Sample(ids, [j > len(ids) // 3 for j in range(len(ids))]))
    groups.append(group)
samples, first = sum(groups, []), [sum(map(len, groups[:i])) for i in range(len(groups))]
advantages = torch.tensor([(i * 7 % 5 - 2) / 2 for i in range(len(samples))])

def loss_of(logprobs_T, entropy_T, mask_T, means_T, advantages_T):
    "Sums over tokens, and over sequences of a function of their means."
    return ((-logprobs_T - 0.1 * entropy_T - (means_T + 4.6).exp() * advantages_T) * mask_T).sum()

found = {}
for name, config in CONFIGS.items():
    path = folder / name
    if distributed.is_main():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(".sinks"):
                parameter.data.copy_(torch.arange(-1.0, 3.0))
        model.save_pretrained(path)
    distributed.barrier()
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    expected = 0.0
    each = zip(samples, advantages.tolist(), strict=True)
    for s, advantage in each if distributed.is_main() else ():
        logp_TV = plain(torch.tensor([s.ids[:-1]]), use_cache=False).logits[0].log_softmax(-1)
        logprobs_T = logp_TV.gather(-1, torch.tensor(s.ids[1:])[:, None])[:, 0]
        mask_T = torch.tensor(s.loss_mask[1:])
        mean = (logprobs_T * mask_T).sum() / mask_T.sum().clamp(min=1)
        loss = loss_of(logprobs_T, -(logp_TV.exp() * logp_TV).sum(-1), mask_T, mean, advantage)
        loss.backward()
        expected += loss.item()
    args = TrainArgs(dtype="float32", context_ranks=context, activation_checkpointing=recompute)
    policy = load_policy(str(path), args, device)
    tokens = 160 // context + 5
    packs = pack_groups(groups[rank::ranks], tokens, device, shortest, together=False)
    total = 0.0
    for mb in packs:
        logprobs_T, entropy_T, correct_T = policy(mb)
        assert correct_T.dtype == torch.bool and len(correct_T) == len(mb.targets_T)
        means_T = sequence_mean(logprobs_T, mb.loss_mask_T, mb.sequence_ids_T)
        loss = loss_of(logprobs_T, entropy_T, mb.loss_mask_T, means_T, mb.on_tokens(advantages))
        (loss * ranks).backward()
        total += loss.item()
    gradient = {}
    for name_, _ in plain.named_parameters():
        gradient[name_] = policy.hf.get_parameter(name_).grad.full_tensor()
    total = float(distributed.all_sum(total))
    computed = [len(mb.model_tokens.targets_T) for mb in packs]
    pairs = [[a, b] for a, b in zip(samples[rank::ranks][::2], samples[rank::ranks][1::2])]
    scalar = load_scalar_model(str(path), args, device)
    for mb in pack_groups(pairs, 300, device):
        values_T = scalar(mb)
        assert len(values_T) == len(mb.targets_T) and values_T.requires_grad
    found[name] = dict(computed=distributed.gather_objects(computed))
    if distributed.is_main():
        norm = max(p.grad.abs().max().item() for p in plain.parameters())
        worst = max((gradient[n] - p.grad).abs().max().item() for n, p in plain.named_parameters())
        found[name] |= dict(loss=abs(total / expected - 1), gradient=worst / norm)
if distributed.is_main():
    (folder / "found.json").write_text(json.dumps(found))
distributed.cleanup()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, context, recompute, shortest",
    [(3, 1, "no", 8), (4, 2, "recompute", 1)],
)
def test_gradient_equals_that_of_plain_transformers(ranks, context, recompute, shortest, tmp_path):
    """Cases: any assignment to ranks, shared prefixes, losses of tokens and of whole sequences, one
    key head, windows, sinks, recomputed blocks, and a sequence that does not fit on one rank."""
    run(ranks, RANKS, tmp_path, context, recompute, shortest)
    for name, found in json.loads((tmp_path / "found.json").read_text()).items():
        assert found["loss"] < 1e-6 and found["gradient"] < 1e-5, (name, found)
        for tokens in zip(*found["computed"], strict=True):  # on each rank, for one micro-batch
            assert max(tokens) <= 160 // context + 5


CHECKED = """
import runpy, sys
import torch.distributed as dist
dist.set_debug_level(dist.DebugLevel.DETAIL)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ranks", "flags", "of_ranks"),
    [
        ("ppo", 4, "--lora_rank 4 --activation_checkpointing true --minibatches 2 --max_steps 1",
         "--shard_ranks 2 --offload all"),
        ("grpo", 3, "", "--rollout_ranks 1 --max_staleness 0"),
    ],
)  # fmt: skip
def test_scripts_with_context_ranks_are_like_one_rank(
    script, ranks, flags, of_ranks, main, small, tmp_path
):
    """Two replicas of policy and value model, each on two ranks that are a context group; or one
    group beside a dedicated rollout rank. Prefixes are shared on many ranks only. Torch checks that
    all ranks of a group make the same collectives in the same order: NCCL hangs where they do
    not."""
    flags = (
        *small, "--max_steps", 2, *flags.split(), "--eval_every", 0, "--save_every", 100,
        "--engine", "transformers", "--prompts_per_step", 8, "--samples_per_prompt", 4,
        "--max_new_tokens", 12, "--lr", 1e-3, "--warmup_steps", 0,
    )  # fmt: skip
    main(script, *flags, "--share_prefix", 0, "--output_dir", tmp_path / "one")
    of_ranks = ("--context_ranks", 2, "--pack_tokens", 100, "--share_prefix", 1, *of_ranks.split())
    flags += (*of_ranks, "--output_dir", tmp_path / "many")
    run(ranks, CHECKED, ROOT / f"{script}.py", *flags)
    names = ("loss", "grad_norm", *(("value_loss", "value_grad_norm") if script == "ppo" else ()))
    assert_close_metrics(tmp_path / "one", tmp_path / "many", names, rel=1e-3, floor=0.1)


def test_context_ranks_must_divide_ranks_and_heads(device):
    import sft
    from common.config.groups import TrainArgs, check_ranks
    from common.model.policy import load_policy
    from common.model.tiny import tiny_model

    with pytest.raises(ValueError, match="^--context_ranks 3 must divide the 4 training ranks$"):
        check_ranks(sft.Args(context_ranks=3), 4)
    words = "^--context_ranks 3: does not divide the 4 attention heads of the model$"
    with pytest.raises(ValueError, match=words):
        load_policy(tiny_model(), TrainArgs(context_ranks=3), device)
