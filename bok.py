"""Best-of-k fine-tuning, also known as rejection sampling (Dong et al. 2023, RAFT, arXiv:2304.06767; asynchronously:
Noukhovitch et al. 2024, arXiv:2410.18252).

    torchrun --nproc_per_node 8 bok.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k --reward gsm8k

Several completions of each prompt are sampled and rewarded, the best are kept, and the policy is fitted to them by
maximum likelihood, as in sft.py. Nothing pushes down what was bad. With `--beta` completions are ranked by their reward
minus beta times log(policy / starting model). With `--offline` the starting model samples once, for all prompts, and
what is kept of that is the training set.

Differences from the papers: one rollout is one optimizer step by default, where RAFT alternates large rounds of
sampling and training (--prompts_per_step, --minibatches and --epochs_per_rollout make those). See docs/bok.md.

Shapes: P prompts on this rank, G samples per prompt, T packed tokens in one micro-batch. Every per-token stream is
aligned with *targets*: x_T[t] describes the prediction of targets_T[t].
"""

import math
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from common.config.flags import AtLeast2, NotNegative, Positive, with_flags
from common.config.groups import OnlineArgs, SamplingArgs, TrainArgs
from common.config.parse import parse
from common.data.packing import Sample, of_samples, pack_minibatches, to_samples
from common.model.hub import context_length, load_tokenizer, resolve_model
from common.model.logprobs import add_logprobs
from common.model.lora import LoRAArgs
from common.model.policy import load_policy, load_reference
from common.objectives.shaping import truncation_penalties
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout.completions_file import read_completions, sample_completions, samples_to_train_on
from common.rollout.prompts import Prompts, load_prompts
from common.rollout.remote_sampler import make_rollouts, serve
from common.rollout.sampler import Rollouts
from common.rollout.statistics import check_rollout, evaluate, measure_groups, measure_sampling, truncated
from common.train.checkpoint import prepare_output_dir
from common.train.optim import adamw, optimizer_step
from common.train.run import Run

OFFLINE_FILE = "completions.jsonl"


@dataclass
class Args(OnlineArgs, SamplingArgs, LoRAArgs, TrainArgs):
    output_dir: str = "runs/bok"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/; with --offline
    completions.jsonl too"""
    samples_per_prompt: AtLeast2 = 4
    """completions sampled for each prompt (G, the k of best-of-k)"""
    keep: Positive[int] = 1
    """how many of them are trained on: those of highest reward, of equal ones the first"""
    keep_above: float | None = None
    """train on all whose reward (less penalties) is above this, however many; in place of --keep"""
    beta: NotNegative[float] = 0.0
    """what ranks completions is reward - beta x log(policy / starting model); 0 never loads the starting model"""
    offline: bool = False
    """sample once before training, from the starting model, and train on what is kept of that"""
    lr: Positive[float] = 1e-6
    """peak learning rate of AdamW"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep >= self.samples_per_prompt:
            raise ValueError(f"--keep {self.keep}: 1 to {self.samples_per_prompt - 1} of --samples_per_prompt")
        self.require_read("keep", self.keep_above is None, "--keep_above replaces it")
        self.require_read("beta", not self.offline, "with --offline the policy that samples is the starting model")
        self.require_read("rollout_ranks", not self.offline, "with --offline nothing is sampled during training")


def best(ranking_PG: Tensor, *, keep: int, keep_above: float | None) -> Tensor:
    """Which completions are trained on, [P, G] bool: the first `keep` of each group in descending order, of equal ones
    the first, or all above `keep_above`. One without a reward (NaN) never is."""
    if keep_above is not None:
        return ranking_PG > keep_above
    order_PG = ranking_PG.nan_to_num(nan=-math.inf).argsort(dim=-1, descending=True, stable=True)
    return (order_PG.argsort(dim=-1) < keep) & ~ranking_PG.isnan()


def sample_offline(
    args: Args, prompts: Prompts, rollouts: Rollouts, rewards: Rewards, tokenizer
) -> list[list[Sample]] | None:
    """The starting model's completions of every prompt, rewarded, on every rank: from completions.jsonl, which grows as
    they come and is only read once it is whole. None if the run was told to stop meanwhile. Collective.

    Raises `ValueError` for a file that is damaged or of other prompts.
    """
    file = Path(args.output_dir) / OFFLINE_FILE
    lines = read_completions("--output_dir", file, prompts, tokenizer, own=True, to_train_on=True)
    if lines and (found := len(lines[0]["completions"])) != args.samples_per_prompt:
        raise ValueError(f"{file}: {found} completions of a prompt, --samples_per_prompt is {args.samples_per_prompt}")

    def generate(asked: Prompts, seeds: list[int]) -> list[list[Sample]]:
        return rollouts.sample_now(0, asked, seeds, args.samples_per_prompt, args.temperature)

    lines = sample_completions(
        file, lines, prompts, generate, rewards, batch_size=args.prompts_per_step, seed=args.seed, to_train_on=True
    )
    if len(lines) == len(prompts):
        return samples_to_train_on(lines, prompts, tokenizer, episodes=args.environment is not None)
    if distributed.is_main():
        print(f"told to stop after {len(lines)} of {len(prompts)} prompts; the same command goes on from there")
    return None


def main(args: Args) -> None:
    # ---- setup: one process per GPU, identical Args everywhere ----
    device, _, world_size = distributed.setup(args.seed, args.rollout_ranks, args.nccl_timeout)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until the others are done
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and what the rewards need beside them ----
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path, args)
    prompts, held_out = load_prompts(args, tokenizer, context_length(path, args))
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device)
    total_steps = args.max_steps or math.ceil(args.epochs * len(prompts) / args.prompts_per_step)

    # ---- models: FSDP2 shards train; vLLM samples, in the same process or on the rollout ranks ----
    model = load_policy(path, args, device)
    reference = load_reference(model, args, device) if args.beta else None
    optimizer = adamw(model, args)
    rollouts = make_rollouts(model, prompts, args, tokenizer, device, rewards)
    if args.offline:  # before a checkpoint is loaded: the policy still is the starting model
        stored = sample_offline(args, prompts, rollouts, rewards, tokenizer)
        if stored is None:
            rollouts.close()
            return distributed.cleanup()

    # ---- what is kept, its floats bound to the flags of their names ----
    choose, cut_off = with_flags(best, args), with_flags(truncation_penalties, args)

    # ---- resume: everything else is a function of (seed, step) ----
    run = Run(
        args, model, optimizer, tokenizer, total_steps, rollouts=rollouts,
        show=("loss", "reward", "eval/pass_at_1", "time/step"),
        curves=("reward", *(f"rewards/{name}/mean" for name in rewards.scorers), "eval/pass_at_1", "eval/reward",
                "kept/reward", "loss", "kl", "entropy", "completions/mean_length", "grad_norm"),
    )  # fmt: skip
    meter, updates = run.meter, args.minibatches * args.epochs_per_rollout
    run.message(
        f"{prompts}, {held_out} held out, {total_steps} steps on {world_size} ranks, {rollouts}, "
        f"{updates} updates per rollout"
    )
    if args.offline:
        stored_PG = of_samples(stored, "reward")
        run.message(f"offline: {stored_PG.numel()} completions, mean reward {stored_PG.nanmean():.4g}")
    if held_out and run.first_step == 0:
        run.log(0, evaluate(rollouts, 0, held_out, rewards))

    for step in run.steps():
        # ---- 1. rollout, by the weights we are about to update or, with --rollout_ranks, somewhat older ones ----
        with meter.time("step"):
            if args.offline:
                drawn = rollouts.order.draw(args.prompts_per_step)
                groups = [stored[drawn[i]] for i in rollouts.positions]
                rewards_PG, parts = of_samples(groups, "reward"), {}
            else:
                rollouts.submit(step, total_steps)
                groups = rollouts.collect(step, meter)
                if groups is None:  # told to stop
                    break
                with meter.time("reward"):
                    rewards_PG, parts = rewards(groups, meter)
            measure_groups(meter, groups, rewards_PG, parts, first=step == 0)
            if run.checks_engine(step) and (step == 0 or not args.offline):  # what is stored is of the starting model
                check_rollout(model, groups, step, args, device)

            # ---- 2. rank and choose ----
            ranking_PG = rewards_PG + cut_off(truncated(groups))
            if reference is not None:
                with meter.time("logprobs"):
                    everything = pack_minibatches(groups, 1, args.pack_tokens, device)
                    add_logprobs("old", model, everything, args.temperature)
                    add_logprobs("ref", reference, everything, args.temperature)
                for mb in chain(*everything):
                    mb.to_samples(kl=mb.sequence_sums(mb.old_logprobs_T - mb.ref_logprobs_T))
                kl_PG = of_samples(groups, "kl")
                ranking_PG = ranking_PG - args.beta * kl_PG
                meter.mean("kl", kl_PG.sum(), kl_PG.numel())
            kept_PG = choose(ranking_PG)
            to_samples(groups, advantage=kept_PG.double())  # for samples.jsonl
            kept = [[sample for sample in group if sample.advantage] for group in groups]
            minibatches = pack_minibatches(kept, args.minibatches, args.pack_tokens, device)
            meter.mean("kept/reward", rewards_PG[kept_PG].sum(), kept_PG.sum())
            meter.mean("kept/fraction", kept_PG.sum(), kept_PG.numel())

            # ---- 3. update: maximum likelihood of what was kept ----
            with meter.time("train"):
                for minibatch in minibatches * args.epochs_per_rollout:
                    tokens = distributed.all_sum(sum(mb.loss_mask_T.sum() for mb in minibatch))
                    minibatch_loss = torch.zeros((), device=device)
                    for mb in minibatch:
                        logprobs_T, entropy_T, *_ = model(mb, temperature=args.temperature)
                        # Mean over the tokens of the *global* minibatch. FSDP averages over ranks; undo that.
                        loss = -(logprobs_T * mb.loss_mask_T).sum() / tokens.clamp(min=1)
                        (loss * world_size).backward()
                        minibatch_loss += loss.detach()
                        meter.masked_mean("loss", -logprobs_T, mb.loss_mask_T)
                        meter.masked_mean("entropy", entropy_T, mb.loss_mask_T)
                        if mb.old_logprobs_T is None:  # the first pass
                            mb.old_logprobs_T = logprobs_T.detach()
                            measure_sampling(meter, mb)
                    lr = run.learning_rate(step)
                    if not tokens:  # nothing is good enough: no step by momentum alone
                        optimizer.zero_grad()
                        continue
                    meter.mean("grad_norm", optimizer_step(model, optimizer, lr, args.max_grad_norm, minibatch_loss))

        # ---- 4. log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr)
        if held_out and run.evaluates(step + 1):
            metrics |= evaluate(rollouts, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        run.show_samples(step + 1, groups, rollouts.positions)

    run.end()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
