"""Online DPO against a reward (Guo et al. 2024, arXiv:2402.04792; asynchronously: Noukhovitch et al. 2024,
arXiv:2410.18252).

    torchrun --nproc_per_node 8 online_dpo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k --reward gsm8k

Several completions of each prompt are sampled and rewarded; the best and the worst of them are a pair, and an objective
of dpo.py makes the policy prefer the one to the other by more than the starting model does. No value model, no
importance ratio: a pair that somewhat older weights sampled is still a pair, so of the online scripts this one minds
`--max_staleness` least.

Differences from the papers: more than two completions may be sampled, and every objective of dpo.py that looks at one
pair at a time can be had. See docs/online_dpo.md.

Shapes: P prompts on this rank, G samples per prompt; N completions and T packed tokens in one micro-batch, whose
completions 2i and 2i + 1 are chosen and rejected of pair i. Every per-token stream is aligned with *targets*: x_T[t]
describes the prediction of targets_T[t].
"""

import math
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from common.config.flags import AtLeast2, Positive, with_flags
from common.config.groups import OnlineArgs, PreferenceArgs, SamplingArgs, TrainArgs
from common.config.parse import parse
from common.data.packing import PackedBatch, Sample, pack_minibatches
from common.metrics.meter import Meter
from common.model.hub import context_length, load_tokenizer, resolve_model
from common.model.logprobs import add_logprobs
from common.model.lora import LoRAArgs
from common.model.policy import load_policy, load_reference
from common.objectives.preference import (
    LOSSES,
    OVER_BATCH,
    REFERENCE_FREE,
    Pairs,
    implicit_rewards,
    preference_losses,
    rewards_per_token,
)
from common.objectives.shaping import truncation_penalties
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout import statistics
from common.rollout.prompts import load_prompts
from common.rollout.remote_sampler import make_rollouts, serve
from common.train.checkpoint import prepare_output_dir
from common.train.optim import adamw, optimizer_step
from common.train.run import Run


@dataclass
class Args(PreferenceArgs, OnlineArgs, SamplingArgs, LoRAArgs, TrainArgs):
    output_dir: str = "runs/online_dpo"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/"""
    samples_per_prompt: AtLeast2 = 2
    """completions sampled for each prompt (G); the best and the worst are the pair"""
    lr: Positive[float] = 1e-6
    """peak learning rate of AdamW"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if sorting := OVER_BATCH & set(self.loss):
            raise ValueError(f"--loss {min(sorting)} looks at all pairs of a batch at once: it is for dpo.py")


def best_and_worst(groups: list[list[Sample]], rewards_PG: Tensor) -> list[list[Sample]]:
    """[chosen, rejected] of each group: highest and lowest reward, of equal ones the first. [] for a group whose
    rewards, those that could be computed (not NaN), are all equal. For samples.jsonl their advantage is 1 and -1."""
    pairs = []
    for group, rewards_G in zip(groups, rewards_PG, strict=True):
        best, worst = rewards_G.nan_to_num(nan=-math.inf).argmax(), rewards_G.nan_to_num(nan=math.inf).argmin()
        if rewards_G[best] > rewards_G[worst]:
            group[best].advantage, group[worst].advantage = 1.0, -1.0
        pairs.append([group[best], group[worst]] if rewards_G[best] > rewards_G[worst] else [])
    return pairs


def measure_pairs(meter: Meter, rewards_PG: Tensor) -> None:
    """How far apart best and worst are, in rewards, and how often no choice could be made, or only among equals."""
    best_P = rewards_PG.nan_to_num(nan=-math.inf).amax(-1)
    worst_P = rewards_PG.nan_to_num(nan=math.inf).amin(-1)
    unequal_P = best_P > worst_P
    tied_P = ((rewards_PG == best_P[:, None]).sum(-1) > 1) | ((rewards_PG == worst_P[:, None]).sum(-1) > 1)
    meter.mean("pairs/win_margin", (best_P - worst_P)[unequal_P].sum(), unequal_P.sum())
    meter.mean("pairs/skipped_fraction", (~unequal_P).sum(), len(unequal_P))
    meter.mean("pairs/tied_fraction", (tied_P & unequal_P).sum(), len(unequal_P))


def pairs_of(mb: PackedBatch, logprobs_T: Tensor) -> Pairs:
    """What the objectives see: log-probs summed over completions, those of the starting model, and lengths."""
    logps_N = mb.sequence_sums(logprobs_T)
    ref_logps_N = torch.zeros_like(logps_N) if mb.ref_logprobs_T is None else mb.sequence_sums(mb.ref_logprobs_T)
    lengths_N = mb.sequence_sums(torch.ones_like(logprobs_T))
    sides = [x_N[side::2] for x_N in (logps_N, ref_logps_N, lengths_N) for side in (0, 1)]
    return Pairs(*sides, weights=torch.ones_like(sides[0]))


def measure_policy(meter: Meter, args: Args, pairs: Pairs, loss_N: Tensor) -> None:
    """What the policy thinks of the pairs of a micro-batch, by the first objective."""
    referenced, per_token = args.loss[0] not in REFERENCE_FREE, rewards_per_token(args.loss[0], args.length_normalize)
    chosen_N, rejected_N = implicit_rewards(pairs, per_token=per_token, referenced=referenced, beta=args.beta)
    for name, values_N in (
        ("loss", loss_N), ("rewards/chosen", chosen_N), ("rewards/rejected", rejected_N),
        ("rewards/margins", chosen_N - rejected_N), ("rewards/accuracies", chosen_N > rejected_N),
        ("logps/chosen", pairs.chosen_logps), ("logps/rejected", pairs.rejected_logps),
    ):  # fmt: skip
        meter.mean(name, values_N.detach().sum(), len(values_N))


def main(args: Args) -> None:
    # ---- setup: one process per GPU, identical Args everywhere ----
    device, _, world_size = distributed.setup(args.seed, args.rollout_ranks, args.nccl_timeout)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until the others are done
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and what the rewards need beside them ----
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path, args)
    context = min(context_length(path, args), args.room // 2 + 1)  # a pair shares a pack
    prompts, held_out = load_prompts(args, tokenizer, context)
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device)
    total_steps = args.max_steps or math.ceil(args.epochs * len(prompts) / args.prompts_per_step)

    # ---- models: FSDP2 shards train; vLLM samples, in the same process or on the rollout ranks ----
    model = load_policy(path, args, device)
    referenced = not set(args.loss) <= REFERENCE_FREE
    reference = load_reference(model, args, device) if referenced else None
    optimizer = adamw(model, args)
    rollouts = make_rollouts(model, prompts, args, tokenizer, device, rewards)

    # ---- the objectives, their floats bound to the flags of their names ----
    objectives = {name: with_flags(LOSSES[name], args) for name in args.loss}
    cut_off = with_flags(truncation_penalties, args)

    # ---- resume: everything else is a function of (seed, step) ----
    run = Run(
        args, model, optimizer, tokenizer, total_steps, rollouts=rollouts,
        show=("reward", "rewards/accuracies", "eval/pass_at_1", "time/step"),
        curves=("reward", *(f"rewards/{name}/mean" for name in rewards.scorers), "eval/pass_at_1", "eval/reward", "kl",
                "pairs/win_margin", "rewards/accuracies", "entropy", "completions/mean_length", "grad_norm"),
    )  # fmt: skip
    meter, updates = run.meter, args.minibatches * args.epochs_per_rollout
    run.message(
        f"{prompts}, {held_out} held out, {total_steps} steps on {world_size} ranks, {rollouts}, "
        f"{updates} updates per rollout"
    )
    if held_out and run.first_step == 0:
        run.log(0, statistics.evaluate(rollouts, 0, held_out, rewards))

    for step in run.steps():
        # ---- 1. rollout, by the weights we are about to update or, with --rollout_ranks, somewhat older ones ----
        with meter.time("step"):
            rollouts.submit(step, total_steps)
            groups = rollouts.collect(step, meter)
            if groups is None:  # told to stop
                break

            # ---- 2. score and choose ----
            with meter.time("reward"):
                scores_PG, parts = rewards(groups, meter)
            statistics.measure_groups(meter, groups, scores_PG, parts, first=step == 0)
            rewards_PG = scores_PG + cut_off(statistics.truncated(groups))
            measure_pairs(meter, rewards_PG)
            if run.checks_engine(step):
                statistics.check_rollout(model, groups, step, args, device)
            chosen_and_rejected = best_and_worst(groups, rewards_PG)

            # ---- 3. pack the pairs; log-probs of the starting model ----
            minibatches = pack_minibatches(
                chosen_and_rejected, args.minibatches, args.pack_tokens, device, together=True
            )
            with meter.time("logprobs"):
                if reference is not None:
                    add_logprobs("ref", reference, minibatches, args.temperature)

            # ---- 4. update: one optimizer step per minibatch ----
            with meter.time("train"):
                for minibatch in minibatches * args.epochs_per_rollout:
                    lr = run.learning_rate(step)
                    global_pairs = int(distributed.all_sum(sum(len(mb.samples) // 2 for mb in minibatch)))
                    if not global_pairs:  # every group is all equal: nothing to learn, and no step by momentum alone
                        continue
                    minibatch_loss = torch.zeros((), device=device)
                    for mb in minibatch:
                        logprobs_T, entropy_T, *_ = model(mb, temperature=args.temperature)
                        pairs = pairs_of(mb, logprobs_T)
                        loss_N, _ = preference_losses(pairs, objectives, args.loss_weights)
                        if args.sft_weight:
                            nll_N = -pairs.mean_pc if args.sft_length_normalize else -pairs.chosen_logps
                            loss_N = loss_N + args.sft_weight * nll_N
                        # Mean over the pairs of the *global* minibatch. FSDP averages over ranks; undo that.
                        loss = loss_N.sum() / global_pairs
                        (loss * world_size).backward()
                        minibatch_loss += loss.detach()
                        mb.old_logprobs_T = logprobs_T.detach() if mb.old_logprobs_T is None else mb.old_logprobs_T
                        statistics.measure_update(meter, mb, entropy_T)
                        measure_policy(meter, args, pairs, loss_N)
                        if reference is not None:
                            meter.mean("kl", (pairs.lc + pairs.lr).detach().sum(), 2 * len(loss_N))
                    meter.mean("grad_norm", optimizer_step(model, optimizer, lr, args.max_grad_norm, minibatch_loss))

        # ---- 5. log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr)
        if held_out and run.evaluates(step + 1):
            metrics |= statistics.evaluate(rollouts, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        run.show_samples(step + 1, groups, rollouts.positions)

    run.end()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
