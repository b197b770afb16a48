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

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common import distributed
from common.checkpoint import Checkpointer, prepare_output_dir
from common.cli import parse
from common.config import OnlineArgs
from common.data import Encoder
from common.hub import context_length, load_tokenizer, resolve_model
from common.metrics import Meter, RunLogger, Totals
from common.models import Policy, load_policy
from common.online import (
    check_first_rollout,
    effective_sample_size,
    evaluate,
    measure_groups,
    measure_sampling,
    truncation_penalties,
)
from common.optim import adamw, learning_rate, optimizer_step
from common.packing import Sample, pack
from common.prompts import encode_prompts, prompt_columns
from common.rewards.scoring import Rewards
from common.rollout.colocated import Rollouts
from common.rollout.remote import make_rollouts, serve
from common.rows import train_and_eval_rows


@dataclass
class Args(OnlineArgs):
    output_dir: str = "runs/bok"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/; with --offline
    completions.jsonl too"""
    samples_per_prompt: int = 4
    """completions sampled for each prompt (G, the k of best-of-k)"""
    keep: int = 1
    """how many of them are trained on: those of highest reward, of equal ones the first"""
    keep_above: float | None = None
    """train on all whose reward (less penalties) is above this, however many; in place of --keep"""
    beta: float = 0.0
    """what ranks completions is reward - beta x log(policy / starting model); 0 never loads the starting model"""
    offline: bool = False
    """sample once before training, from the starting model, and train on what is kept of that"""
    lr: float = 1e-6
    """peak learning rate of AdamW"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_prompt < 2:
            raise ValueError(f"--samples_per_prompt {self.samples_per_prompt}: the best of k needs at least 2")
        if not 0 < self.keep < self.samples_per_prompt:
            raise ValueError(f"--keep {self.keep}: 1 to {self.samples_per_prompt - 1} of --samples_per_prompt")
        self.require_not_negative("beta")
        self.require_read("keep", self.keep_above is None, "--keep_above replaces it")
        if self.keep_above is not None:
            self.require_finite("keep_above")
        self.require_read("beta", not self.offline, "with --offline the policy that samples is the starting model")
        self.require_read("rollout_ranks", not self.offline, "with --offline nothing is sampled during training")


def choose(args: Args, groups: list[list[Sample]], ranking_PG: Tensor) -> list[list[Sample]]:
    """What is kept of each group, best first. A completion without a reward (NaN) never is."""
    kept = []
    for group, ranking_G in zip(groups, ranking_PG.tolist(), strict=True):
        best = sorted((i for i, x in enumerate(ranking_G) if not math.isnan(x)), key=lambda i: -ranking_G[i])
        if args.keep_above is None:
            best = best[: args.keep]  # sorted() is stable: of equal ones the first
        else:
            best = [i for i in best if ranking_G[i] > args.keep_above]
        kept.append([group[i] for i in best])
    return kept


@torch.no_grad()
def log_ratios(
    groups: list[list[Sample]], model: Policy, reference: Policy, args: Args, device: torch.device
) -> Tensor:
    """log(policy / starting model) of each completion, [P, G] float64, nats. Collective."""
    of_sample = {}
    for mb in pack([sample for group in groups for sample in group], args.pack_tokens, device):
        (logprobs_T, *_), (ref_logprobs_T, *_) = (m(mb, temperature=args.temperature) for m in (model, reference))
        of_sample |= zip(map(id, mb.samples), mb.sequence_sums(logprobs_T - ref_logprobs_T).tolist(), strict=True)
    model.reshard()  # a forward without backward leaves the root whole
    return torch.tensor([[of_sample[id(s)] for s in group] for group in groups], dtype=torch.float64)


def sample_offline(
    args: Args, prompts: list[list[int]], rows: list[dict], rollouts: Rollouts, rewards: Rewards
) -> tuple[list[list[Sample]], Tensor] | None:
    """Completions by the starting model for every prompt, and their rewards [prompts, G], on every rank. Collective.
    None if the run was told to stop meanwhile.

    They are in completions.jsonl, a prompt a line, which grows as they come and is only read once it is whole.
    Raises `ValueError` for a file that is damaged or of other prompts.
    """
    path, size = Path(args.output_dir) / "completions.jsonl", args.prompts_per_step
    text = path.read_text(encoding="utf-8", errors="replace") if distributed.is_main() and path.is_file() else ""
    lines = distributed.gather_objects(text.split("\n")[:-1])[0]  # a kill may cut the last
    groups, scores = [], []
    for number, line in enumerate(lines, 1):
        prompt, row = (prompts[number - 1], rows[number - 1]) if number <= len(prompts) else (None, None)
        try:
            stored = json.loads(line)
            same_prompt = stored["prompt"] == prompt
            group = [_stored_sample(prompt or [], row, completion) for completion in stored["completions"]]
            scores.append([float(completion["reward"]) for completion in stored["completions"]])
            if len(group) != args.samples_per_prompt:
                raise ValueError("a completion is missing")
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number} is damaged; mend or delete the file") from error
        if not same_prompt:
            raise ValueError(f"{path}, line {number} is of another prompt than the data has there")
        groups.append(group)
    if distributed.is_main() and len(lines) < len(prompts):
        print(f"offline: sampling for {len(prompts) - len(lines)} of {len(prompts)} prompts", flush=True)
        path.with_suffix(".tmp").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        path.with_suffix(".tmp").rename(path)
    for start in range(len(lines), len(prompts), size):
        chunk = range(start, min(start + size, len(prompts)))
        seeds = [distributed.fold_seed(args.seed, row) for row in chunk]
        asked = [prompts[row] for row in chunk]
        sampled = rollouts.sample_now(
            0, asked, rows[chunk.start : chunk.stop], seeds, args.samples_per_prompt, args.temperature
        )
        if distributed.stop_requested():
            if distributed.is_main():
                print(f"told to stop after {start} of {len(prompts)} prompts; the same command goes on from there")
            return None
        mine = chunk[rollouts.rank :: rollouts.ranks]
        for row, group in zip(mine, sampled, strict=True):
            for sample in group:
                sample.row = rows[row]
        scores_PG, _ = rewards(sampled, Meter())
        of_row = dict(zip(mine, zip(sampled, scores_PG.tolist(), strict=True), strict=True))
        of_row = distributed.gather_dict(of_row)
        groups += [of_row[row][0] for row in chunk]
        scores += [of_row[row][1] for row in chunk]
        if distributed.is_main():
            with path.open("a", encoding="utf-8") as file:
                file.writelines(_line(*of_row[row]) for row in chunk)
    return groups, torch.tensor(scores, dtype=torch.float64)


def _line(group: list[Sample], rewards_G: list[float]) -> str:
    completions = [
        dict(ids=sample.completion_ids, logprobs=sample.rollout_logprobs[sample.prompt_length :], text=sample.text,
             finish_reason=sample.finish_reason, reward=reward)
        for sample, reward in zip(group, rewards_G, strict=True)
    ]  # fmt: skip
    prompt = group[0].ids[: group[0].prompt_length]
    return json.dumps(dict(prompt=prompt, completions=completions)) + "\n"


def _stored_sample(prompt: list[int], row: dict, stored: dict) -> Sample:
    ids = stored["ids"]
    if not ids or len(ids) != len(stored["logprobs"]) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError("ids or logprobs")
    return Sample(
        prompt + ids, [False] * len(prompt) + [True] * len(ids), prompt_length=len(prompt), row=row,
        rollout_logprobs=[0.0] * len(prompt) + stored["logprobs"], finish_reason=stored["finish_reason"],
        text=stored["text"],
    )  # fmt: skip


def main(args: Args) -> None:
    # ---- setup: one process per GPU, identical Args everywhere ----
    device, _, world_size = distributed.setup(args.seed, args.rollout_ranks)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until the others are done
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and what the rewards need beside them ----
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path)
    encoder = Encoder(tokenizer, args)
    rows, eval_rows = train_and_eval_rows(args)
    columns = prompt_columns(args, rows + eval_rows)
    rewards = Rewards(args, rows + eval_rows, tokenizer, device)
    room = context_length(path, args) - args.max_new_tokens
    prompts, rows, dropped = encode_prompts(rows, columns, encoder, room, args)
    eval_prompts, eval_rows, eval_dropped = encode_prompts(eval_rows, columns, encoder, room, args)
    total_steps = args.max_steps or math.ceil(args.epochs * len(prompts) / args.prompts_per_step)

    # ---- models: FSDP2 shards train; vLLM samples, in the same process or on the rollout ranks ----
    model = load_policy(path, args, device)
    reference = load_policy(path, args, device, trainable=False) if args.beta else None
    optimizer = adamw(model, args)
    rollouts = make_rollouts(model, prompts, rows, args, tokenizer, device)
    if args.offline:  # before a checkpoint is loaded: the policy still is the starting model
        stored = sample_offline(args, prompts, rows, rollouts, rewards)
        if stored is None:
            rollouts.close()
            return distributed.cleanup()
        stored_groups, stored_scores = stored

    # ---- resume: everything else is a function of (seed, step) ----
    totals = Totals()
    checkpointer = Checkpointer(args, model, optimizer, rollouts=rollouts, totals=totals)
    first_step = checkpointer.load_latest()
    meter = Meter()
    logger = RunLogger(
        args, first_step, total_steps, show=("loss", "reward", "eval/pass_at_1", "time/step"),
        curves=("reward", *(f"rewards/{name}/mean" for name in rewards.scorers), "eval/pass_at_1", "eval/reward",
                "kept/reward", "loss", "kl", "entropy", "completions/mean_length", "grad_norm"),
    )  # fmt: skip
    updates = args.minibatches * args.epochs_per_rollout
    logger.message(
        f"{len(prompts)} prompts ({dropped} too long), {len(eval_prompts)} held out ({eval_dropped} too long), "
        f"{total_steps} steps on {world_size} ranks, {rollouts}, {updates} updates per rollout"
    )
    if args.offline:
        logger.message(f"offline: {stored_scores.numel()} completions, mean reward {stored_scores.nanmean():.4g}")
    if eval_prompts and first_step == 0:
        logger.log(0, evaluate(rollouts, 0, eval_prompts, eval_rows, rewards))

    stopping = False
    for step in range(first_step, total_steps):
        # ---- 1. rollout, by the weights we are about to update or, with --rollout_ranks, somewhat older ones ----
        with meter.time("step"):
            if args.offline:
                drawn = rollouts.order.draw(args.prompts_per_step)
                mine = [drawn[i] for i in rollouts.positions]
                groups, scores_PG, parts = [stored_groups[row] for row in mine], stored_scores[mine], {}
            else:
                rollouts.submit(step, total_steps)
                groups = rollouts.collect(step, meter)
                if groups is None:  # told to stop
                    stopping = True
                    break
                with meter.time("reward"):
                    scores_PG, parts = rewards(groups, meter)
            measure_groups(meter, groups, scores_PG, parts)
            if step == first_step and (step == 0 or not args.offline):  # what is stored is of the starting model
                check_first_rollout(model, groups, args, device)

            # ---- 2. rank and choose ----
            ranking_PG = scores_PG + truncation_penalties(groups, args)
            if reference is not None:
                with meter.time("logprobs"):
                    kl_PG = log_ratios(groups, model, reference, args, device)
                ranking_PG = ranking_PG - args.beta * kl_PG
                meter.mean("kl", kl_PG.sum(), kl_PG.numel())
            kept = choose(args, groups, ranking_PG)
            # Groups [m * size, (m + 1) * size) of every rank are minibatch m: the same global prompts on any ranks.
            # pack() gives every rank the same number of micro-batches: FSDP collectives must match.
            size = len(groups) // args.minibatches
            minibatches = [
                pack([s for best in kept[m : m + size] for s in best], args.pack_tokens, device)
                for m in range(0, len(groups), size)
            ]
            for group, scores_G, best in zip(groups, scores_PG.tolist(), kept, strict=True):
                for sample, score in zip(group, scores_G, strict=True):
                    is_kept = any(sample is s for s in best)
                    sample.advantage = float(is_kept)  # for samples.jsonl
                    if is_kept:
                        meter.mean("kept/reward", score)
                meter.mean("kept/fraction", len(best), len(group))

            # ---- 3. update: maximum likelihood of what was kept ----
            with meter.time("train"):
                for update in range(updates):
                    minibatch = minibatches[update % args.minibatches]
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
                        if update < args.minibatches:
                            mb.old_logprobs_T = logprobs_T.detach()
                            measure_sampling(meter, mb, torch.ones_like(mb.old_logprobs_T))
                    lr = learning_rate(step, total_steps, args)
                    if not tokens:  # nothing is good enough: no step by momentum alone
                        optimizer.zero_grad()
                        continue
                    grad_norm = optimizer_step(model, optimizer, lr, args.max_grad_norm, minibatch_loss)
                    meter.mean("grad_norm", grad_norm)

        # ---- 4. log, evaluate, checkpoint ----
        totals.num_tokens += int(distributed.all_sum(sum(s.num_targets for group in groups for s in group)))
        metrics = effective_sample_size(meter.reduce())
        metrics |= dict(lr=lr, epoch=rollouts.epochs_done, num_tokens=totals.num_tokens)
        last = step + 1 == total_steps
        if eval_prompts and ((step + 1) % args.eval_every == 0 or last):
            metrics |= evaluate(rollouts, step + 1, eval_prompts, eval_rows, rewards)
        logger.log(step + 1, metrics)
        if (step + 1) % args.log_every == 0 or last:
            logger.samples(step + 1, groups, scores_PG, rollouts.positions)
        stopping = distributed.stop_requested()
        if stopping:
            step += 1
            break
        if (step + 1) % args.save_every == 0 or last:
            with meter.time("save"):  # counted in the next step's line
                checkpointer.save(step + 1)
            logger.draw_curves()

    if stopping:
        if step > 0:
            checkpointer.save(step)
        logger.message(f"told to stop after step {step}; the same command goes on from there")
    else:
        checkpointer.export_hf(tokenizer)
        logger.message(f"done: {args.output_dir}/hf")
    logger.close()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
