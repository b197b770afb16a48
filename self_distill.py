r"""Self-distillation: a model with a hint in its prompt teaches itself to do without (SDFT,
arXiv:2601.19897; OPSD, arXiv:2601.18734; SDPO, arXiv:2601.20802; all of 2026).

    torchrun --nproc_per_node 8 self_distill.py --config configs/qwen3_1.7b_self_distill.yaml

The student pi samples completions y of a prompt x. The teacher q scores the same tokens after a
prompt with a hint. On each token the student is pulled to the teacher's distribution:

    L = mean_t D(pi, q)                                                 D: --divergence       loss()
    q = pi, pi at its start, or q <- 0.95 q + 0.05 pi                   --teacher     move_towards()

The hint is a column of the data (a demonstration: SDFT; the solution: OPSD), a successful
completion of the group, or the text that a reward returns (SDPO). Completions without a hint are
not trained on. Differences from the papers (docs/self_distill.md): the loss is a mean over the
global minibatch, without importance weights; the top k tokens are the teacher's.

Shapes: P prompts on this rank, B on all ranks, G completions of each, T packed tokens of a
micro-batch, U tokens of the same completions after hinted prompts, D hidden size; x_T[t] describes
targets_T[t]."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import NotNegative, Positive, Several
from common.config.online import TINY_ONLINE, OnlineArgs, refuse_agent
from common.config.parse import parse
from common.evaluate.estimators import SOLVED
from common.evaluate.held_out import evaluate_prompts
from common.metrics.meter import Meter
from common.model.distill import Comparison, OwnTeacher, Teacher
from common.model.hub import longest_sequence, resolve_model
from common.model.logprobs import Logits
from common.model.policy import load_policy, load_reference, move_towards
from common.objectives.divergence import DIVERGENCES, DivergenceArgs
from common.packs.packing import count_trained, pack_minibatches, split_pairs
from common.packs.sample import Completion, Group
from common.parallel import distributed
from common.rewards.total import Rewards
from common.rollout.agreement import measure_mismatch, require_rollout_agreement
from common.rollout.measure import measure_groups
from common.rollout.prompts import load_prompts, prompt_columns
from common.rollout.sampler import make_sampler, serve
from common.text.encode import Encoder
from common.text.hints import hint_filler, hint_of_row, hinted_prompt
from common.text.tokenizer import load_tokenizer
from common.train.optim import adamw, optimizer_step
from common.train.overview import describe_rollouts, dry_run, num_steps
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

SHOW = ("loss", "reward", "reverse_kl", "hints/used", "eval/solved", "time/step")
CURVES = ("loss", "reward", "reverse_kl", "agreement", "hints/used", "eval/solved", "entropy",
          "teacher_entropy", "completions/mean_length", "grad_norm")  # fmt: skip
COMPARED = {
    "reverse_kl": "reverse_kl_T",
    "agreement": "agree_T",
    "teacher_entropy": "teacher_entropy_T",
    "teacher_mass": "teacher_mass_T",
}

# ---- the objective ----


def aligned(teacher: Logits, hinted_U: Tensor, hinted_T: Tensor) -> Logits:
    """Move the teacher's logits to the places of the student's tokens. The masks mark the same
    tokens in the same order, in the teacher's pack and in the student's. At other places all logits
    are equal, so that no token is preferred."""
    # Hinted tokens first. (To index by a mask, the host would wait for the GPU.)
    places_U = hinted_U.logical_not().argsort(stable=True)
    moved_TD = teacher.hidden_TD[places_U[(hinted_T.cumsum(0) - 1).clamp(min=0)]]
    return teacher._replace(hidden_TD=torch.where(hinted_T[:, None], moved_TD, 0))


def loss(comparison: Comparison, mask_T: Tensor, num_tokens: Tensor) -> Tensor:
    """Return each token's share of L. `comparison`: student and teacher; `mask_T`: trained tokens,
    of which the global minibatch has `num_tokens`."""
    return comparison.divergence_T * mask_T / num_tokens


@dataclass
class Args(DivergenceArgs, OnlineArgs):
    TINY_DEFAULTS: ClassVar = TINY_ONLINE | dict(reward="exact_match", hint="sibling")
    samples_per_prompt: Positive[int] = 8
    reward: Several[str] = ()
    """score completions by these rewards (docs/rewards.md lists all), for --hint sibling and
    feedback; for other hints they are only measured"""
    lr: Positive[float] = 1e-5
    share_prefix: NotNegative[int] = 0
    """must be 0: a completion is packed after two prompts, which differ"""
    hint: str | None = None
    """put this hint into the teacher's prompt; required. a name: this column of the data; sibling:
    another completion of the group, whose first reward is at least 1; feedback: the text that a
    reward returns"""
    hint_template: str = r"{prompt}\n\nA hint:\n\n{hint}\n\nNow answer in your own words."
    """fill in this for the teacher: {prompt}, {hint}, columns of the row; \\n: line break"""
    teacher: Literal["live", "start", "ema"] = "ema"
    """teach with these weights. live: the policy's; start: those at the start of the run; ema: a
    moving average of the policy's"""

    def __post_init__(self) -> None:
        for flag, value in (("share_prefix", 0), ("context_ranks", 1)):
            if getattr(self, flag) != value:
                why = "each completion is packed with its two prompts"
                raise ValueError(f"--{flag} {getattr(self, flag)} has no effect here: {why}")
        refuse_agent(self.agent)  # its branches are no completion for the two prompts
        if self.missing_eos_penalty:
            raise ValueError("--missing_eos_penalty has no effect here: rewards are only measured")
        flag = f"--hint {self.hint}"
        if not self.reward and self.hint in ("sibling", "feedback"):
            raise ValueError(f"{flag} needs --reward")
        if self.samples_per_prompt == 1 and self.hint == "sibling":
            raise ValueError(f"{flag} needs --samples_per_prompt above 1")
        if "{hint}" not in self.hint_template:
            raise ValueError(f"--hint_template {self.hint_template!r}: {{hint}} is missing")


# ---- hints, and completions after hinted prompts ----


def hints_of(group: Group, rewards_G: list[float], hint: str) -> list[str]:
    """Return the hint of each completion of a prompt; "" where there is none. The hint `sibling` is
    the next successful completion, never the completion itself."""
    if hint == "feedback":
        return [sample.feedback for sample in group]
    if hint != "sibling":
        return [hint_of_row(group[0].row, hint)] * len(group)
    texts = [s.text if r >= SOLVED else "" for s, r in zip(group, rewards_G, strict=True)]
    others = [texts[g + 1 :] + texts[:g] for g in range(len(group))]
    return [next(filter(None, each), "") for each in others]


def pair(sample: Completion, prompt: list[int]) -> list[Completion]:
    """Return a completion, and its copy after the hinted `prompt`."""
    kept = slice(sample.prompt_length, None)
    n = len(prompt)
    copy = replace(
        sample, ids=prompt + sample.ids[kept], loss_mask=[False] * n + sample.loss_mask[kept],
        prompt_length=n, versions=[-1] * n + sample.versions[kept],
        rollout_logprobs=[0.0] * n + sample.rollout_logprobs[kept],
    )  # fmt: skip
    return [sample, copy]


def hinted_pairs(
    groups: list[Group], rewards_PG: Tensor, make_prompt: Callable[[dict, str], list[int]],
    longest: int, meter: Meter, args: Args,
) -> list[list[Completion]]:  # fmt: skip
    """Return the pair of every completion, or [] if it has no hint or its hinted prompt does not
    fit. Count the completions with a pair, and the prompts that do not fit. `make_prompt`: (row,
    hint) -> hinted prompt."""
    pairs = []
    for group, rewards_G in zip(groups, rewards_PG.tolist(), strict=True):
        hints = hints_of(group, rewards_G, args.hint)
        prompts = {hint: make_prompt(group[0].row, hint) for hint in {*hints} - {""}}
        for sample, hint in zip(group, hints, strict=True):
            prompt = prompts.get(hint, [])
            size = len(prompt) + len(sample.completion_ids)
            pair_targets = size - 1 + sample.num_targets
            fits = size <= longest and pair_targets <= args.pack_limit.tokens
            pairs.append(pair(sample, prompt) if prompt and fits else [])
            meter.mean("hints/used", bool(pairs[-1]))
            meter.mean("hints/too_long", bool(prompt) and not fits)
    return pairs


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.live_rollout_ranks)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    prepare_output_dir(args, args.dry_run)

    # ---- data: prompts as token ids, and the rewards of their completions ----
    path = resolve_model(args.model, weights=not args.dry_run)
    tokenizer = load_tokenizer(path, args)
    limit = longest_sequence(path, args)
    prompts, held_out = load_prompts(args, tokenizer, limit, also_read=[args.hint])
    (column,) = prompt_columns(args, prompts.rows, also_read=[args.hint])
    fill = hint_filler(args.hint, args.hint_template, prompts.rows)
    make_prompt = partial(hinted_prompt, Encoder(tokenizer, args), column, fill)
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device, args.dry_run)
    is_own, is_moving = args.teacher == "live", args.teacher == "ema"
    if args.dry_run:
        return dry_run(args, path, tokenizer, prompts, held_out, rewards, [] if is_own else [path],
                       kind=OwnTeacher, moving=is_moving, own_forwards=int(is_own))  # fmt: skip
    begin_run(args, prompts.rows, held_out.rows)

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device, kind=OwnTeacher)  # trained
    teacher = policy
    if not is_own:  # frozen; with adapters, the policy with other ones
        teacher = load_reference(policy, args, device, kind=Teacher, moves=is_moving)
    optimizer = adamw(policy, args)
    sampler = make_sampler(policy, prompts, args, tokenizer, on_complete=rewards.begin)

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, prompts)
    run = Run(args, policy, optimizer, tokenizer, total_steps, sampler=sampler, show=SHOW,
              curves=CURVES, moving=teacher if is_moving else None,
              frozen=[teacher] if type(teacher) is Teacher else [])  # fmt: skip
    run.message(*describe_rollouts(args, prompts, held_out, sampler))
    meter = run.meter
    reward_prompts = held_out if args.reward else []  # prompts whose completions have a reward
    if run.first_step == 0:
        run.log(0, evaluate_prompts(sampler, 0, reward_prompts, rewards))

    for step in run.steps():  # saves checkpoints between steps
        # ---- 1. rollout: G completions of each of P prompts; rewards ----
        rollout = sampler.rollout(step, total_steps, meter)  # syncs weights, then samples
        if rollout is None:  # a stop was requested
            break
        groups, positions = rollout.groups, rollout.positions  # P of the B groups
        with meter.time("reward"):
            rewards_PG, named_rewards, _ = rewards.wait(groups, meter)
        measure_groups(meter, groups, rewards_PG, named_rewards, warn=step == 0)

        # ---- 2. pack: hinted completions beside their copies after hinted prompts, then apart ----
        first_PG = rewards.first(named_rewards) if args.reward else rewards_PG
        pairs = hinted_pairs(groups, first_PG, make_prompt, limit.tokens, meter, args)
        G = args.samples_per_prompt
        pair_positions = [p * G + g for p in positions for g in range(G)]  # on all ranks
        packed = pack_minibatches(
            pairs, pair_positions, args.minibatches, args.pack_tokens, device, together=True
        )
        halves = [[split_pairs(mb) for mb in mbs] for mbs in packed]
        minibatches = [[own for own, _ in mbs] for mbs in halves]
        copies = [[copy for _, copy in mbs] for mbs in halves]
        if run.checks_engine(step):  # all completions, also those without a hint
            require_rollout_agreement(policy, groups, step, args)

        # ---- 3. update: one optimizer step per minibatch; a loss of nan or inf stops the run ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            for n in range(args.updates_per_rollout):
                m = n % args.minibatches
                num_tokens, _ = count_trained(minibatches[m])  # on all ranks
                total_loss = torch.zeros((), device=device)
                for mb, copy in zip(minibatches[m], copies[m], strict=True):
                    logits = aligned(teacher.teach(copy), copy.loss_mask_T, mb.loss_mask_T)
                    comparison = policy.distill(
                        mb, logits, DIVERGENCES[args.divergence], args.top_k, args.temperature
                    )
                    share_T = loss(comparison, mb.loss_mask_T, num_tokens)
                    # FSDP averages gradients over ranks; undo that.
                    (share_T.sum() * world_size).backward()
                    total_loss += share_T.detach().sum()
                    meter.tokens(mb, {"entropy": comparison.entropy_T}, share_T)
                    for name, stream in COMPARED.items():
                        meter.masked_mean(name, getattr(comparison, stream), mb.loss_mask_T)
                    if n == 0:  # before any update
                        measure_mismatch(meter, comparison.logprobs_T.detach(), mb)
                grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, total_loss)
                if is_moving:
                    move_towards(teacher, policy, rate=0.05)
                meter.mean("grad_norm", grad_norm)
                meter.sum_over_ranks("loss", total_loss)

        # ---- 4. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr)
        if run.evaluates(step + 1):
            metrics |= evaluate_prompts(sampler, step + 1, reward_prompts, rewards)
        run.log(step + 1, metrics)
        none_PG = torch.zeros_like(rewards_PG)  # no completion has an advantage
        run.show_samples(step + 1, groups, positions, rewards_PG, none_PG, named_rewards)

    run.end()
    sampler.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
