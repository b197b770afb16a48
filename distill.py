"""On-policy distillation: a student learns from a teacher on what it writes itself (GKD, Agarwal et al. 2023,
arXiv:2306.13649; MiniLLM, Gu et al. 2023, arXiv:2306.08543).

    torchrun --nproc_per_node 8 distill.py --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-8B --dataset openai/gsm8k

The student pi samples, and on each of its tokens its distribution is pulled towards that of the teacher q:

    full:     L   = mean_t D(pi, q) of the distributions at t; D: --divergence                            loss()
    sampled:  L   = mean_t [ -c_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t) ]          loss()
              A_t = teacher_coef log(q(y_t) / pi_old(y_t)) + reward_coef A_i     rho_t = pi(y_t) / pi_old(y_t)
              A_i = (r_i - mean(r_1..r_G)) / std(r_1..r_G)                                          advantages()

`--on_policy_fraction` below 1 takes the other completions of a step from the data. Differences from the papers
(docs/distill.md): the fraction is of each step's prompts, not a coin for each step; the sampling has no gradient (as in
GKD); only `sampled` learns from a reward; bounded weights c_t = pi_old(y_t) / pi_engine(y_t).

Shapes: P prompts on this rank, G completions of each, T packed tokens of a micro-batch; x_T[t] describes targets_T[t].
"""

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import BelowOne, Fraction, NotNegative, OpenFraction, Positive, Several, require_default
from common.config.groups import TINY_ONLINE, OnlineArgs
from common.config.objectives import CorrectionArgs
from common.config.parse import parse
from common.data.encode import Encoder, truncate
from common.data.order import make_order
from common.data.packing import pack, pack_minibatches
from common.data.rows import SFT_COLUMNS, require_columns, usable
from common.data.sample import Sample
from common.metrics.meter import Meter
from common.model.comparison import Comparison
from common.model.hub import context_length, load_tokenizer, require_same_tokenizer, resolve_model
from common.model.policy import Policy, load_policy
from common.model.scoring import with_logprobs
from common.model.teacher import StoredTeacher, load_teacher, require_known, shared_vocabulary
from common.objectives.advantages import centre_groups
from common.objectives.divergence import DIVERGENCES, Divergence, jsd
from common.objectives.importance import importance_weights
from common.objectives.policy import bounded_exp, is_clipped
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout import statistics
from common.rollout.prompts import Prompts, load_prompts
from common.rollout.remote_sampler import make_sampler, serve
from common.train.optim import adamw, optimizer_step
from common.train.overview import num_steps, repetitions
from common.train.plan import dry_run
from common.train.run import Run
from common.train.run_folder import prepare_output_dir

COLUMNS = tuple(pair for pair in SFT_COLUMNS if len(pair) == 2)  # a prompt and its completion
SHOW = ("loss", "reverse_kl", "agreement", "eval_loss", "eval/solved", "time/step")
CURVES = ("loss", "eval_loss", "reverse_kl", "data/reverse_kl", "agreement", "eval/solved", "entropy",
          "teacher_entropy", "completions/mean_length", "grad_norm")  # fmt: skip

# ---- the objective ----


def divergence(args: "Args") -> Divergence:
    """Return the divergence of `--divergence`, a function of the log-probs of student and teacher."""
    return partial(jsd, jsd_beta=args.jsd_beta) if args.divergence == "jsd" else DIVERGENCES[args.divergence]


def advantages(rewards_PG: Tensor) -> Tensor:
    """Return the advantage A_i of every completion, [P, G] float64: 0 without a reward (NaN) or where all are equal."""
    centred_PG, size_P1 = centre_groups(rewards_PG), (~rewards_PG.isnan()).sum(-1, keepdim=True)
    std_P1 = (centred_PG.square().sum(-1, keepdim=True) / (size_P1 - 1).clamp(min=1)).sqrt()
    return centred_PG / (std_P1 + 1e-6)


def loss(
    both: Comparison, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor | None, advantages_T: Tensor | None,
    mask_T: Tensor, sequence_ids_T: Tensor, tokens: Tensor, args: "Args",
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return each token's share of L, a mean over the `tokens` of the *global* minibatch, and tensors [T] to log.
    `both`: student and teacher. Only the student's own completions have `rollout_logprobs_T`, of the engine, and
    `advantages_T`, reward_coef A_i."""
    if args.estimator == "full":
        logged = {} if rollout_logprobs_T is None else {"sampling/kept_fraction": torch.ones_like(mask_T)}
        return both.divergence_T * mask_T / tokens, logged
    A_T = args.teacher_coef * (both.teacher_logprobs_T - old_logprobs_T) + advantages_T
    c_T = importance_weights(
        old_logprobs_T - rollout_logprobs_T, mask_T, sequence_ids_T, level=args.correction, mode=args.correction_mode,
        low=args.correction_low, high=args.correction_high, keep=args.correction_filter,
    )  # fmt: skip
    log_rho_T = both.logprobs_T - old_logprobs_T
    rho_T = bounded_exp(log_rho_T)
    loss_T = -torch.min(rho_T * A_T, rho_T.clamp(1 - args.clip_low, 1 + args.clip_high) * A_T) * c_T
    logged = {"ratio": rho_T.detach(), "sampling/weight": c_T, "sampling/kept_fraction": c_T > 0,
              "clip_ratio/region_mean": is_clipped(log_rho_T.detach(), A_T, args.clip_low, args.clip_high)}  # fmt: skip
    return loss_T * mask_T / tokens, logged


@dataclass
class Args(CorrectionArgs, OnlineArgs):
    TINY_DEFAULTS: ClassVar = TINY_ONLINE | dict(prompts_per_step=256, samples_per_prompt=1, reward="exact_match")
    samples_per_prompt: Positive[int] = 1
    reward: Several[str] = ()
    """rewards by which completions are measured (docs/rewards.md lists all); trained on only with --reward_coef"""
    lr: Positive[float] = 1e-5
    teacher: str | None = None
    """Hugging Face id or folder of the model to learn from, with the student's tokenizer; required"""
    on_policy_fraction: Fraction = 1.0
    """fraction of a step's prompts that the student completes (the paper's lambda); the data completes other rows"""
    divergence: Literal[tuple(DIVERGENCES)] = "reverse_kl"
    """divergence of student pi from teacher q. reverse_kl: KL(pi || q); forward_kl: KL(q || pi); jsd: to a mixture"""
    jsd_beta: OpenFraction = 0.5
    """jsd: weight of the teacher in the mixture; near 0: like forward_kl, near 1: like reverse_kl"""
    top_k: NotNegative[int] = 0
    """number of the teacher's most likely tokens to compare, the others as one token: a lower bound; 0: all tokens"""
    teacher_logprobs: Literal["live", "stored"] = "live"
    """live: computed in every step; stored (with --on_policy_fraction 0): the teacher's top_k log-probs of the data are
    written once, before training, which then needs no teacher in memory"""
    estimator: Literal["full", "sampled"] = "full"
    """full: the divergence; sampled: PPO's clipped loss with log(teacher / student) of each token as its advantage"""
    teacher_coef: NotNegative[float] = 1.0
    """sampled: weight of log(teacher / student) in a token's advantage"""
    reward_coef: NotNegative[float] = 0.0
    """sampled: weight of the completion's advantage by `reward` within its group, (r - mean) / std as in grpo.py"""
    clip_low: BelowOne = 0.2
    """sampled: lower clip bound of the importance ratio, 1 - clip_low"""
    clip_high: NotNegative[float] = 0.2
    """sampled: upper clip bound of the importance ratio, 1 + clip_high"""

    def __post_init__(self) -> None:
        if self.divergence != "jsd":
            require_default(self, ("jsd_beta",), f"with --divergence {self.divergence}")
        if not self.reward_coef:
            require_default(self, ("missing_eos_penalty",), "with --reward_coef 0")
        if self.estimator == "sampled":
            require_default(self, ("divergence", "top_k"), "with --estimator sampled")
        else:
            unused = ("clip_low", "clip_high", "correction", "correction_mode", "correction_low", "correction_high",
                      "correction_filter", "teacher_coef", "reward_coef")  # fmt: skip
            require_default(self, unused, "with --estimator full")
        if self.estimator == "sampled" and self.on_policy_fraction < 1:
            raise ValueError("--estimator sampled is for the student's own samples; set --on_policy_fraction 1")
        if self.reward_coef and (not self.reward or self.samples_per_prompt == 1):
            raise ValueError(f"--reward_coef {self.reward_coef} needs --reward and --samples_per_prompt above 1")
        if not self.teacher_coef and not self.reward_coef:
            raise ValueError("--teacher_coef 0 leaves nothing to learn from; set --reward_coef above 0")
        if not self.needs_engine:
            require_default(self, ("rollout_ranks",), "with --on_policy_fraction 0 and without --reward")
        if self.teacher_logprobs == "stored" and (self.on_policy_fraction > 0 or not self.top_k):
            raise ValueError("--teacher_logprobs stored needs --on_policy_fraction 0 and --top_k above 0")
        if 0 < self.on_policy_fraction < 1 and self.own_prompts in (0, self.prompts_per_step):
            raise ValueError(f"{self._fraction} is {self.own_prompts}; use --on_policy_fraction 0 or 1 for none or all")

    @property
    def own_prompts(self) -> int:
        """Number of a step's prompts that the student completes."""
        return round(self.on_policy_fraction * self.prompts_per_step)

    @property
    def needs_engine(self) -> bool:
        """Whether anything is sampled, to train on or to measure."""
        return self.on_policy_fraction > 0 or len(self.reward) > 0

    @property
    def _fraction(self) -> str:
        return f"--on_policy_fraction {self.on_policy_fraction} of --prompts_per_step {self.prompts_per_step}"

    def check_own_prompts(self, training_ranks: int) -> None:
        """Raise `ValueError` if the student's prompts do not divide evenly."""
        if self.own_prompts % (shares := training_ranks * self.minibatches):
            what = f"the number of training ranks times --minibatches ({shares})"
            raise ValueError(f"{self._fraction} is {self.own_prompts}; it must be a multiple of {what}")


def read_samples(prompts: Prompts, encoder: Encoder, args: Args, needed: bool) -> list[Sample]:
    """Return each prompt with the data's completion, cut after `--max_new_tokens`; skip others unless `needed`."""
    readable = [pair for pair in COLUMNS if all({*pair} <= row.keys() for row in prompts.rows)]
    columns = require_columns(args.dataset_flag, prompts.rows, COLUMNS) if needed else next(iter(readable), None)

    def encode(row: dict) -> Sample:
        sample = encoder.completion(row, "_prompt" if "_prompt" in row else columns[0], columns[1])
        return truncate(sample, sample.prompt_length + args.max_new_tokens)

    samples = [s for _, s in usable(prompts.rows if columns else [], encode, args.on_bad_row if needed else "skip")]
    if needed and not samples:
        raise ValueError(f"{args.dataset_flag}: no row has a completion that can be read")
    return samples


def describe(args: Args, prompts: Prompts, held_out: Prompts, given_held_out: list[Sample], rollouts) -> list[str]:
    """Return lines about the data, the length, the engine and the updates of the run."""
    steps = f"{num_steps(args, prompts)} steps on {distributed.world_size()} ranks"
    how = f"{rollouts or 'no engine'}, {args.updates_per_rollout} updates per rollout"
    own = f"the student completes {args.own_prompts} of {args.prompts_per_step} prompts ({args.on_policy_fraction:g})"
    missing = ["no eval_loss: the held-out rows have no completions"] if len(held_out) and not given_held_out else []
    return [f"{prompts}, {held_out} held out, {steps}, {how}", own, *repetitions(args, prompts), *missing]


def compared(both: Comparison, prefix: str) -> dict[str, Tensor]:
    """Return streams to log about student and teacher: nats, and whether their most likely tokens agree."""
    streams = dict(reverse_kl=both.reverse_kl_T, agreement=both.agree_T, entropy=both.entropy_T,
                   teacher_entropy=both.teacher_entropy_T, teacher_mass=both.teacher_mass_T)  # fmt: skip
    return {prefix + name: x_T for name, x_T in streams.items()}


@torch.no_grad()
def evaluate(
    policy: Policy, teacher: Policy | StoredTeacher, samples: list[Sample], args: Args, device: torch.device
) -> dict[str, float]:
    """Compare student and teacher on held-out completions, divided among the ranks; {} without any. Collective."""
    meter, mine = Meter(), samples[torch.distributed.get_rank() :: distributed.world_size()]
    for mb in pack(mine, args.pack_tokens, device) if samples else []:
        both = policy.distill(mb, teacher.teach(mb), divergence(args), args.top_k, args.temperature)
        means = {"eval_loss": both.divergence_T, "eval/reverse_kl": both.reverse_kl_T, "eval/agreement": both.agree_T}
        meter.tokens(mb, means)
    return meter.reduce() if samples else {}


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, rank, world_size = distributed.setup(args.seed, args.rollout_ranks * (not args.dry_run), args.nccl_timeout)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    args.check_own_prompts(world_size)
    if args.teacher is None:
        raise ValueError("--teacher: there is none; name a folder or a Hugging Face id with --model's tokenizer")
    prepare_output_dir(args, owned=("teacher_logprobs/*",))

    # ---- data: prompts as token ids; `given`: completions of the data ----
    path = resolve_model(args.model, weights=not args.dry_run)
    teacher_path = resolve_model(args.teacher, "--teacher", not args.dry_run)
    tokenizer = load_tokenizer(path, args)
    require_same_tokenizer("--teacher", teacher_path, tokenizer)
    vocabulary = shared_vocabulary(path, teacher_path, args.top_k)
    prompts, held_out = load_prompts(args, tokenizer, min(context_length(p, args) for p in (path, teacher_path)))
    own, encoder = args.own_prompts, Encoder(tokenizer, args)
    given = read_samples(prompts, encoder, args, needed=True) if own < args.prompts_per_step else []
    given_held_out = read_samples(held_out, encoder, args, needed=False)
    order = make_order([s.row for s in given] or prompts.rows, replace(args, seed=distributed.fold_seed(args.seed, 1)))
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device)
    dry_run(args, path, tokenizer, prompts, held_out, rewards, [teacher_path] * (args.teacher_logprobs == "live"))

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device)  # trained
    teacher = load_teacher(teacher_path, given + given_held_out, vocabulary, args, device)  # frozen
    optimizer = adamw(policy, args)
    sampled = replace(args, prompts_per_step=own, on_policy_fraction=1.0) if own else args
    rollouts = make_sampler(policy, prompts, sampled, tokenizer, rewards) if args.needs_engine else None

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    cursors = dict(rollouts=rollouts, order=order) if own else dict(order=order)  # the first one counts the epochs
    total_steps = num_steps(args, prompts)
    run = Run(args, policy, optimizer, tokenizer, total_steps, **cursors, show=SHOW, curves=CURVES)
    run.models.append(teacher)  # counts in speed/tflops
    run.message(*describe(args, prompts, held_out, given_held_out, rollouts))
    meter, rewarded = run.meter, held_out if args.reward else []  # held-out prompts whose completions have a reward
    compare_with = divergence(args) if args.estimator == "full" else None
    if run.first_step == 0:
        first = statistics.evaluate(rollouts, 0, rewarded, rewards)
        run.log(0, first | evaluate(policy, teacher, given_held_out, args, device))

    for step in run.steps():
        # ---- 1. batch: completions of the student, and those of the data ----
        groups = []
        if own:
            groups = rollouts.rollout(step, total_steps, meter)
            if groups is None:  # a stop was requested
                break
            require_known(chain(*groups), teacher)
            with meter.time("reward"):
                rewards_PG, parts, _ = rewards(groups, meter)
            statistics.measure_groups(meter, groups, rewards_PG, parts, first=step == 0)
            shaped_PG = rewards_PG + statistics.truncation_penalties(groups, args.missing_eos_penalty)
            advantages_PG = args.reward_coef * advantages(shaped_PG)
        count = (args.prompts_per_step - own) * args.samples_per_prompt
        from_data = [[given[i]] for i in order.draw(count)[rank::world_size]]

        # ---- 2. pack, each kind apart; log-probs that stay fixed: of the policy before its updates ----
        own_packs, data_packs = (
            pack_minibatches(x, args.minibatches, args.pack_tokens, device) if x else [[]] * args.minibatches
            for x in (groups, from_data)
        )
        check = own > 0 and run.checks_engine(step)
        with meter.time("logprobs"):  # on policy the log-probs of the update itself serve as old ones
            if check or own and args.updates_per_rollout > 1:
                own_packs = with_logprobs(own_packs, args.temperature, old=policy)
        if check:
            statistics.check_agreement(own_packs, step, args, device)

        # ---- 3. update: one optimizer step per minibatch ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            for own_mbs, data_mbs in [*zip(own_packs, data_packs, strict=True)] * args.epochs_per_rollout:
                tokens, _ = statistics.count_trained(own_mbs + data_mbs)  # of the *global* minibatch
                minibatch_loss = torch.zeros((), device=device)
                for prefix, mb in [("", mb) for mb in own_mbs] + [("data/", mb) for mb in data_mbs]:
                    both = policy.distill(mb, teacher.teach(mb), compare_with, args.top_k, args.temperature)
                    old_logprobs_T = both.logprobs_T.detach() if mb.old_logprobs_T is None else mb.old_logprobs_T
                    share_T, logged = loss(
                        both, old_logprobs_T, mb.rollout_logprobs_T, None if prefix else mb.on_tokens(advantages_PG),
                        mb.loss_mask_T, mb.sequence_ids_T, tokens, args,
                    )  # fmt: skip
                    (share_T.sum() * world_size).backward()  # FSDP averages gradients over ranks; undo that
                    minibatch_loss += share_T.detach().sum()
                    meter.tokens(mb, logged | compared(both, prefix), share_T)
                    if not prefix:
                        statistics.measure_mismatch(meter, old_logprobs_T, mb)
                meter.mean("grad_norm", optimizer_step(policy, optimizer, lr, args.max_grad_norm, minibatch_loss))
                meter.mean("loss", minibatch_loss, 1 / world_size)  # the loss is the sum over ranks

        # ---- 4. log and evaluate ----
        metrics = run.reduce(chain(*groups, *from_data), lr=lr)
        if run.evaluates(step + 1):
            metrics |= statistics.evaluate(rollouts, step + 1, rewarded, rewards)
            metrics |= evaluate(policy, teacher, given_held_out, args, device)
        run.log(step + 1, metrics)
        if own:
            run.show_samples(step + 1, groups, rollouts.positions, rewards_PG, advantages_PG, parts)

    run.end()
    if rollouts is not None:
        rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.leave()
