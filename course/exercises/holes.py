"""Table of the exercises: a function of this project, the statements that are cut out of it, the
tests that mark the learner's piece, and three wrong solutions that they must catch.

No code of a solution stands here: `mark.py` cuts the function out of the project's source. A cut is
`first ... last`, two pieces of code: from the first statement of the function that has `first` to
the last statement that has `last`. One piece alone is both. Spaces, line breaks and trailing commas
of a piece do not matter."""

from typing import NamedTuple

CASES = "tests/objectives/test_cases.py"
DATA = "tests/packs/test_packing.py"
DIVERGENCE = "tests/objectives/test_divergence.py"
EVALUATE = "tests/evaluate/test_estimators.py"
GROUPS = "tests/objectives/test_advantages.py"
GRPO = "tests/test_grpo_objective.py"
LOGPROBS = "tests/model/test_logprobs.py"
IMPORTANCE = "tests/objectives/test_importance.py"
KL = "tests/objectives/test_kl.py"
PPO = "tests/test_ppo.py"
PREFERENCE = "tests/objectives/test_preference.py"
REDUCTION = "tests/objectives/test_reduction.py"
COUNTS = "tests/rollout/test_measure.py"
# Hints.
VALUE = "a value differs from the formula"
GRADIENT = "a value or a gradient differs from the formula"


class Exercise(NamedTuple):
    """Exercise. The first test that fails gives the hint; a test without a file is in `CASES`. The
    n-th wrong solution fails the n-th test first: it has other code in place of a piece of the
    cuts."""

    name: str
    function: str  # module:name, or module:class.name
    cuts: tuple[str, ...]
    section: str  # of course/primer.md
    task: str
    tests: dict[str, str]  # [file::]test -> hint
    wrong: tuple[dict[str, str], ...]  # piece -> other code


EXERCISES = [
    Exercise(
        "sft_row",
        "common.text.encode:Encoder._prompt_completion",
        ("self._with_eos ... mask =",),
        "Masks, EOS, truncation",
        """Encode a row of plain text, without a chat template. prompt_ids and ids are the ids of
        the prompt and of the completion. self._with_eos(ids) returns ids that end with EOS. Set
        ids, and mask: whether each token of prompt_ids + ids is trained. Which tokens should the
        model learn to write, and how will it stop?""",
        {
            "test_row_ends_with_eos": (
                "the completion has no end: a model that never sees EOS never stops"
            ),
            "test_eos_is_trained": (
                "EOS is there, but it is masked: the model must learn to write it"
            ),
            "test_prompt_of_a_row_is_not_trained": "the prompt is trained",
            "tests/text/test_encode.py::test_training_prompt_equals_the_sampling_prompt": (
                "text or mask of a row"
            ),
        },
        (
            {"self._with_eos(ids)": "ids"},
            {"[True] * len(ids)": "[True] * (len(ids) - 1) + [False]"},
            {"[False] * len(prompt_ids)": "[True] * len(prompt_ids)"},
        ),
    ),
    Exercise(
        "pack",
        "common.packs.packing:_micro_batch",
        ("ids_T = ... streams_T =",),
        "Masks, EOS, truncation",
        """Put sequences into one stream of T tokens, without padding. A sequence s has arrays with
        one number for each of its ids: s.ids, s.loss_mask (whether it is trained) and s.streams[x]
        for each name x of `streams`. The model reads all ids except the last, and predicts all
        except the first. Set ids_T, the ids that the model reads; targets_T, those that it
        predicts; position_ids_T, 0..L - 1 in each sequence of L targets (`lengths` has the L of
        all); loss_mask_T; and streams_T, a dict in which stream x has the name x_T. The last two
        are aligned with the targets. tensor_of(arrays, device) is a tensor of arrays in a row.""",
        {
            f"{DATA}::test_targets_are_the_next_tokens": (
                "a target must be the token after its input, in each sample"
            ),
            f"{DATA}::test_positions_restart_in_every_sequence": (
                "positions must start at 0 again in every sequence"
            ),
            f"{DATA}::test_every_target_appears_once_with_its_streams": (
                "some stream is not aligned with the targets"
            ),
        },
        (
            {"s.ids[1:]": "s.ids[:-1]"},
            {
                "[np.arange(length) for length in lengths]": "[np.arange(sum(lengths))]",
            },
            {"s.streams[x][1:]": "s.streams[x][:-1]"},
        ),
    ),
    Exercise(
        "logprob",
        "common.model.logprobs:statistics",
        ("largest_C = ... sum_C = exp_CV",),
        "Policy gradients",
        """log p(target) = z_target - log sum_v exp(z_v), where z are the logits [C, V] of C tokens.
        For large logits, exp overflows. So subtract the largest logit of each token first: log p
        stays the same. Set largest_C [C], exp_CV [C, V], sum_C [C] and target_C [C], the logit of
        the target after the subtraction. Subtract in place: the rest of the function expects the
        differences in logits_CV.""",
        {
            "test_logprob_is_that_of_the_target": (
                "the log-prob must be that of the target, not of the likeliest token"
            ),
            "test_probabilities_of_all_targets_add_up_to_1": (
                "the probabilities of all tokens must add up to 1"
            ),
            "test_large_logits_have_finite_logprobs": (
                "exp overflows for large logits: subtract the largest one"
            ),
            f"{LOGPROBS}::test_extreme_logits_do_not_overflow": (
                "some log-prob of extreme logits is wrong"
            ),
            f"{LOGPROBS}::test_token_logprobs_and_gradient_equal_naive_code[None-1-1.0-logprobs]": (
                GRADIENT
            ),
        },
        (
            {"logits_CV.gather(-1, targets_C[:, None])[:, 0]": "logits_CV.amax(-1)"},
            {"exp_CV.sum(-1)": "exp_CV.mean(-1)"},
            {"largest_C = logits_CV.amax(-1)": "largest_C = torch.zeros_like(logits_CV[:, 0])"},
        ),
    ),
    Exercise(
        "entropy",
        "common.model.logprobs:statistics",
        ("entropy_C =",),
        "Policy gradients",
        """H = -sum_v p_v log p_v in nats, [C]. Here logits_CV holds d_v = z_v - max z, exp_CV
        exp(d_v) and sum_C sum_v exp(d_v), so that p_v = exp(d_v) / sum. Set entropy_C. You may
        overwrite logits_CV.""",
        {
            "test_entropy_does_not_depend_on_the_target": (
                "the entropy is that of the distribution; you used the target"
            ),
            "test_entropy_is_never_negative": "an entropy is negative: which sign has log p?",
            "test_entropy_is_at_most_log_V": (
                "an entropy is above log V: are these probabilities normalised?"
            ),
            f"{LOGPROBS}::test_token_logprobs_and_gradient_equal_naive_code[None-1-1.0-entropy]": (
                VALUE
            ),
        },
        (
            {"logits_CV.mul_(exp_CV).sum(-1) / sum_C": "target_C"},
            {"- logits_CV.mul_": "+ logits_CV.mul_"},
            {".sum(-1) / sum_C": ".sum(-1)"},
        ),
    ),
    Exercise(
        "dft",
        "sft:loss",
        ("return",),
        "Reductions and length",
        """Loss of each token, [T]. nll: -log p. dft (arXiv:2508.05629): -sg(p) log p, where sg
        stops the gradient, so that the gradient of an unlikely token, which is 1/p for -log p,
        cannot explode.""",
        {
            "test_sft_losses_fall_as_the_target_becomes_likelier": (
                "a step against the gradient must raise log p"
            ),
            "test_dft_weighs_likely_tokens_more": (
                "the weight of dft is p: the gradient of a likely token is larger"
            ),
            "test_dft_weight_has_no_gradient": (
                "a gradient flows through the weight p: dft stops it"
            ),
            "tests/test_sft.py::test_loss_and_gradient_equal_naive_code": GRADIENT,
        },
        (
            {"detach() * -logprobs_T": "detach() * logprobs_T"},
            {"logprobs_T.exp().detach()": "(1 - logprobs_T.exp()).detach()"},
            {".detach()": ""},
        ),
    ),
    Exercise(
        "global_tokens",
        "common.packs.packing:count_trained",
        ("num_tokens = ... return",),
        "Reductions and length",
        """The loss is a sum over the micro-batches of all ranks, divided by numbers that are
        counted before the first backward pass. Count the trained tokens of the minibatch, and its
        samples with any trained token, on all ranks: distributed.all_sum(x) returns the sum of x
        over the ranks. Return int64 tensors. Both are at least 1, because a denominator of 0 gives
        NaN.""",
        {
            "test_denominators_count_trained_tokens_only": (
                "prompts count: mb.loss_mask_T marks the trained tokens"
            ),
            "test_denominators_are_at_least_1": "a minibatch without trained tokens divides by 0",
            "test_denominators_count_all_ranks": (
                "each rank has its own denominator: their mean is a mean of means"
            ),
            f"{COUNTS}::test_trained_tokens_and_sequences_of_a_minibatch_are_at_least_one_each": (
                "a count is wrong; samples without any trained token do not count"
            ),
        },
        (
            {"mb.loss_mask_T.sum()": "mb.loss_mask_T.numel()"},
            {"num_tokens.clamp(min=1)": "num_tokens"},
            {"distributed.all_sum(sum(mb.loss_mask_T": "torch.as_tensor(sum(mb.loss_mask_T"},
        ),
    ),
    Exercise(
        "reductions",
        "common.objectives.reduction:token_weights",
        ("match reduction",),
        "Reductions and length",
        """Return the weight of each token in the loss, [T]; 0 where mask_T is False. `num_tokens`
        and `num_sequences` count the trained tokens and the completions of the global minibatch, of
        which this is one pack of many. reduction: token: mean over tokens. sequence: mean over
        completions of their token means. sequence_sum: mean over completions of their token sums.
        constant: the same, divided by max_new_tokens. sequence_sum(x_T, mask_T, sequence_ids_T)
        repeats the sum over each sequence on its tokens.""",
        {
            "test_token_mean_is_one_mean_over_all_micro_batches": (
                "token: a mean of the means of micro-batches"
            ),
            "test_sequence_mean_counts_no_prompt": (
                "sequence: the length of a completion has no tokens of the prompt"
            ),
            "test_constant_reduction_is_a_mean_over_completions": (
                "constant: the mean over completions is missing"
            ),
            "test_masked_completion_has_weight_0": (
                "sequence: a completion without trained tokens divides by 0"
            ),
            f"{GRPO}::test_reduction_weights_equal_naive_code": (
                "a weight differs from the definition"
            ),
        },
        (
            {"mask_T / num_tokens": "mask_T / mask_T.sum().clamp(min=1)"},
            {"mask_T, mask_T, sequence_ids_T": "mask_T | True, mask_T | True, sequence_ids_T"},
            {"mask_T / num_sequences / max_new_tokens": "mask_T / max_new_tokens"},
        ),
    ),
    Exercise(
        "sequence_mean",
        "common.objectives.reduction:sequence_mean",
        ("lengths_T = ... return",),
        "Ratios and clipping",
        """GSPO's ratio of a completion is s = exp(mean_t log rho_t) over its trained tokens.
        Average x_T over the trained tokens of each sequence, and repeat the mean on each of its
        tokens, [T]. A sequence without trained tokens gets 0. sequence_sum(x_T, mask_T,
        sequence_ids_T) does the same for sums.""",
        {
            f"{DATA}::test_mean_of_a_sequence_without_trained_tokens_is_zero": (
                "0 / 0 without trained tokens"
            ),
            "test_sequence_mean_ignores_other_sequences": (
                "a mean over the whole pack: other sequences change it"
            ),
            "test_sequence_mean_divides_by_the_trained_tokens": "the length counts masked tokens",
            f"{REDUCTION}::test_sequence_sums_and_means_count_only_trained_tokens": VALUE,
        },
        (
            {".clamp(min=1)": ""},
            {"lengths_T.clamp": "mask_T.sum().clamp"},
            {"sequence_sum(mask_T, mask_T,": "sequence_sum(mask_T | True, mask_T | True,"},
        ),
    ),
    Exercise(
        "bradley_terry",
        "rm:loss",
        ("centring_W = ... return",),
        "Preference learning",
        """Bradley-Terry: P(chosen beats rejected) = sigmoid(r_c - r_r). Return the loss of each
        pair, [W]: -log sigmoid(r_c - r_r - margin) + center_coefficient (r_c + r_r)^2. It must stay
        finite for differences of 10,000.""",
        {
            "test_reward_loss_falls_as_the_chosen_reward_rises": (
                "the loss falls as the *rejected* reward rises"
            ),
            "test_margin_asks_for_a_larger_difference": (
                "a margin makes a pair harder: the loss must rise with it"
            ),
            "test_reward_loss_of_a_confident_mistake_is_finite": (
                "log(sigmoid(x)) is log(0) for x = -10,000"
            ),
            "tests/test_rm.py::test_bradley_terry_loss_equals_a_calculation_by_hand": GRADIENT,
        },
        (
            {"chosen_W - rejected_W": "rejected_W - chosen_W"},
            {"- margin_W": "+ margin_W"},
            {
                "-logsigmoid(chosen_W - rejected_W - margin_W)": (
                    "-(chosen_W - rejected_W - margin_W).sigmoid().log()"
                ),
            },
        ),
    ),
    Exercise(
        "dpo",
        "dpo:loss",
        ("z = ... logsigmoid(-z)",),
        "Preference learning",
        """DPO: z = beta (log pi(y_c)/ref(y_c) - log pi(y_r)/ref(y_r)) and L = -log sigmoid(z), [W].
        pairs.lc and pairs.lr are the two log-ratios, each a sum over the tokens of a completion;
        f_slope(u, kind) is u by default.
        cDPO, with label smoothing e: a label is wrong with probability e, so L = -(1 - e) log
        sigmoid(z) - e log sigmoid(-z). Set terms[name].""",
        {
            "test_dpo_is_ln_2_at_the_reference": (
                "if policy = reference, the loss must be ln 2 = 0.693"
            ),
            "test_dpo_does_not_depend_on_lengths": (
                "DPO uses sums over tokens: lengths of completions must change nothing"
            ),
            "test_smoothing_of_a_half_ignores_the_labels": (
                "e = 1/2: swapping chosen and rejected must change nothing"
            ),
            "tests/test_dpo.py::test_stated_loss_equals_that_of_online_dpo": VALUE,
        },
        (
            {
                "f_slope(pairs.lc, kind) - f_slope(pairs.lr, kind)": (
                    "f_slope(pairs.chosen_logps, kind) - f_slope(pairs.rejected_logps, kind)"
                ),
            },
            {
                "f_slope(pairs.lc, kind) - f_slope(pairs.lr, kind)": (
                    "f_slope(pairs.lc / pairs.chosen_lengths, kind)"
                    " - f_slope(pairs.lr / pairs.rejected_lengths, kind)"
                ),
            },
            {"- e * logsigmoid(-z)": "+ e * logsigmoid(-z)"},
        ),
    ),
    Exercise(
        "ipo",
        "common.objectives.preference:preference_loss",
        ("gap = p.lc ... (gap -",),
        "Preference learning",
        """IPO (arXiv:2310.12036) regresses the difference of log-ratios to a target: (h - 1 / (2
        beta))^2, [W], with h = lc - lr. Here lc and lr are first divided by the lengths of chosen
        and rejected.""",
        {
            "test_ipo_is_zero_at_its_target": "the minimum must be at h = 1 / (2 beta)",
            "test_ipo_compares_log_ratios_per_token": ("log-ratios are per token, not sums"),
            "test_ipo_quadruples_at_twice_the_distance": "the loss is the square of the distance",
            f"{PREFERENCE}::test_value_and_gradient_equal_naive_code[ipo]": GRADIENT,
        },
        (
            {"1 / (2 * beta)": "1 / beta"},
            {"p.lc / p.chosen_lengths - p.lr / p.rejected_lengths": "p.lc - p.lr"},
            {".square()": ".abs()"},
        ),
    ),
    Exercise(
        "kto_loss",
        "kto:loss",
        ("margin_N = ... return",),
        "Preference learning",
        """KTO compares the log-ratio l of one completion with the baseline z0. Desirable
        completions have the loss w_d (1 - sigmoid(beta (l - z0))), others w_u (1 - sigmoid(beta (z0
        - l))), [N]. args has beta, desirable_weight and undesirable_weight. 1 - sigmoid(x) =
        sigmoid(-x).""",
        {
            "test_kto_is_half_the_weight_at_the_baseline": "at l = z0 the loss must be w / 2",
            "test_kto_raises_desirable_completions_and_lowers_others": (
                "the loss must fall as a desirable l rises"
            ),
            "test_kto_weights_belong_to_their_labels": (
                "the weights of desirable and undesirable are swapped"
            ),
            "tests/test_kto.py::test_value_and_gradient_equal_a_calculation_by_hand": GRADIENT,
        },
        (
            {"(log_ratio_N - baseline)": "log_ratio_N"},
            {"1.0, -1.0": "-1.0, 1.0"},
            {
                "args.desirable_weight, args.undesirable_weight": (
                    "args.undesirable_weight, args.desirable_weight"
                ),
            },
        ),
    ),
    Exercise(
        "kto_baseline",
        "kto:kl_baseline",
        ("sums = ... return",),
        "Preference learning",
        """z0 = max(0, mean log pi(y')/ref(y')) over the mismatches y' of the global batch.
        policy(mb)[0] has log-probs [T], mb.sequence_sums(x_T) their sums per sequence,
        mb.select(ref_logps_B) the reference's numbers for the sequences of mb. ref_logps_B has one
        number for each mismatch of the global batch. distributed.all_sum adds up over ranks. Return
        a tensor on the device of micro_batches[0].loss_mask_T.""",
        {
            "test_kto_baseline_is_relative_to_the_reference": (
                "z0 is a mean of log-ratios: subtract the reference"
            ),
            "test_kto_baseline_is_not_below_0": "a KL is not negative: z0 must not be below 0",
            "test_kto_baseline_is_that_of_all_ranks": "each rank has a baseline of its own",
            "test_kto_baseline_bounds_the_mean_not_each_number": (
                "the bound holds for the mean, not for each completion"
            ),
        },
        (
            {"- mb.select(ref_logps_B)": ""},
            {"mean.clamp(min=0)": "mean"},
            {"distributed.all_sum(sum(sums))": "sum(sums)"},
        ),
    ),
    Exercise(
        "group_advantage",
        "common.objectives.advantages:group_std",
        ("size_P1 = ... return",),
        "Advantages by groups",
        """GRPO: A = (r - mean) / (std + 1e-6), with mean and sample standard deviation (division by
        n - 1) of the group. Return the standard deviation of the n rewards of each group, [P, 1].
        NaN is a missing reward: it counts in no statistic. centre_groups(rewards_PG) returns
        r - mean, and 0 for a missing reward. Equal rewards, or a single one, have exactly 0.""",
        {
            f"{GROUPS}::test_advantages_depend_only_on_the_own_group": "another group changes A",
            "test_group_std_divides_by_n_minus_1": (
                "two rewards, 1 and 0: A must be +0.707 and -0.707 (sample std)"
            ),
            f"{GROUPS}::test_missing_rewards_are_excluded_from_group_statistics": (
                "a missing reward (NaN), or a lone one, must get 0 and count in no statistic"
            ),
            "test_equal_rewards_have_no_group_advantage": "equal rewards: the deviation is not 0",
            f"{GROUPS}::test_group_advantages_equal_the_naive_formula": VALUE,
        },
        (
            {".square().sum(-1, keepdim=True)": ".square().sum()"},
            {"(size_P1 - 1)": "size_P1"},
            {".clamp(min=1)": ""},
        ),
    ),
    Exercise(
        "leave_one_out",
        "rloo:advantages",
        ("size_B1 = ... return",),
        "Advantages by groups",
        """RLOO: A_i = r_i - mean of the *other* rewards of its group, [B, G]. NaN is a missing
        reward: it counts in no mean and gets 0. centre_groups(rewards_BG) returns r - mean over all
        rewards of the group, 0 for a missing one. How do the two differ? A group with a single
        reward gets 0.""",
        {
            "test_leave_one_out_of_two_is_their_difference": "rewards 1 and 0: A must be 1 and -1",
            "test_leave_one_out_ignores_missing_rewards": (
                "a missing reward (NaN) counts as a member of the group"
            ),
            "test_lone_reward_has_no_advantage": "a single reward has no others: 0 / 0",
            "tests/test_rloo.py::test_baseline_is_the_mean_of_the_others": VALUE,
        },
        (
            {" * size_B1 / (size_B1 - 1).clamp(min=1)": ""},
            {
                "(~rewards_BG.isnan()).sum(-1, keepdim=True)": (
                    "torch.full((len(rewards_BG), 1), rewards_BG.shape[1])"
                ),
            },
            {".clamp(min=1)": ""},
        ),
    ),
    Exercise(
        "moments",
        "common.metrics.moments:moments",
        ("mean = ... return",),
        "Advantages by groups",
        """REINFORCE++ whitens advantages over all tokens of the batch. xs has the values on the
        trained tokens of each micro-batch of this rank, and count is the number of these tokens on
        all ranks. Return mean and sample standard deviation (n - 1) over the tokens of all ranks,
        two floats. distributed.all_sum(x) adds a number over the ranks. A single token has the
        deviation 0.""",
        {
            "test_moments_are_over_tokens_not_packs": "each token counts once, not each pack",
            "test_moments_have_a_sample_standard_deviation": (
                "the sample standard deviation divides by n - 1"
            ),
            "test_moments_are_those_of_all_ranks": "the tokens of other ranks count too",
        },
        (
            {"sum(x.sum() for x in xs))) / count": "sum(x.mean() for x in xs))) / len(xs)"},
            {"count - 1": "count"},
            {
                "distributed.all_sum(sum((x - mean).square().sum() for x in xs))": (
                    "sum((x - mean).square().sum() for x in xs)"
                )
            },
        ),
    ),
    Exercise(
        "clip",
        "grpo:clip",
        ("clipped_T = ... loss_T =",),
        "Ratios and clipping",
        """PPO's surrogate, to be maximised: min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A).
        Set loss_T, [T]. rho_T is pi / pi_old, with a gradient; A is x.A_T, the bounds are
        x.clip_low and x.clip_high.""",
        {
            "test_clip_loss_has_the_gradient_of_rho_A_within_the_bounds": (
                "within the bounds the gradient must be -rho A"
            ),
            "test_clip_stops_a_ratio_that_moved_the_right_way": (
                "beyond the bound that A pulls towards, the loss must be constant"
            ),
            "test_clip_pulls_back_a_ratio_that_moved_the_wrong_way": (
                "a ratio that left the bounds against A must be pulled back"
            ),
            f"{GRPO}::test_losses_by_token_equal_naive_code[clip]": GRADIENT,
        },
        (
            {"torch.min(rho_T * x.A_T": "torch.min(rho_T.detach() * x.A_T"},
            {"torch.min": "torch.max"},
            {"torch.min(rho_T * x.A_T, clipped_T * x.A_T)": "clipped_T * x.A_T"},
        ),
    ),
    Exercise(
        "kl",
        "common.objectives.kl:kl_estimate",
        ("d_T = logprobs_T ... match estimator",),
        "KL and its estimators",
        """Estimates of KL(policy || reference) on each token, [T], from samples of the policy, with
        d = log(policy / reference): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. Set kl_T for
        `estimator`. For k3 bound -d by EXPONENT_LIMIT, so that exp stays finite; torch.expm1(x) is
        exp(x) - 1, also accurate near 0.""",
        {
            "test_kl_estimates_are_0_for_equal_policies": "d = 0 must give 0 for every estimator",
            "test_k1_is_positive_where_the_policy_is_likelier": (
                "k1 has the wrong sign: this is KL(reference || policy)"
            ),
            "test_k2_and_k3_agree_near_0": "near d = 0, k2 and k3 must agree",
            f"{KL}::test_kl_estimates_equal_naive_code": GRADIENT,
            f"{KL}::test_kl_k3_of_a_token_with_vanishing_probability_is_finite_in_float32": (
                "k3 overflows for d = -500"
            ),
        },
        (
            {"torch.expm1(-d_T)": "torch.exp(-d_T)"},
            {"logprobs_T - ref_logprobs_T": "ref_logprobs_T - logprobs_T"},
            {"d_T.square() / 2": "d_T.square()"},
        ),
    ),
    Exercise(
        "gae",
        "common.objectives.advantages:gae",
        ("if n != sequence ... advantages.append",),
        "Value functions and GAE",
        """delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambda A_{t+1}, with V = A
        = 0 after the last token of a sequence. The loop goes over the trained tokens from the last
        to the first; n is the number of the token's sequence. Append each token's A to
        advantages.""",
        {
            "test_gae_with_lambda_0_is_the_error_of_one_step": (
                "lambda = 0: A_t must be r_t + gamma V_{t+1} - V_t"
            ),
            "test_gae_of_the_last_token_is_its_reward_minus_its_value": (
                "last token: A must be r - V; off by one?"
            ),
            "test_gae_decays_later_errors_by_gamma_lambda": (
                "an error k tokens later counts (gamma lambda)^k"
            ),
            f"{GROUPS}::test_gae_is_the_sum_over_discounted_deltas_of_trained_tokens": VALUE,
        },
        (
            {" + gamma * V_next": ""},
            {"sequence, A, V_next = n, 0.0, 0.0": "sequence, A, V_next = n, 0.0, V"},
            {"gamma * gae_lambda * A": "gamma * A"},
        ),
    ),
    Exercise(
        "value_loss",
        "ppo:value_loss",
        ("loss_T = ... return",),
        "Value functions and GAE",
        """Half the squared error of the values to the returns, [T]: the maximum of this and of the
        same for the value bounded to [old - 0.2, old + 0.2], so that a value does not move far in
        one rollout.""",
        {
            "test_value_loss_is_half_the_squared_error": "within the bounds: (V - R)^2 / 2",
            "test_value_clip_never_lowers_the_loss": (
                "the clip makes the loss smaller: take the larger of the two"
            ),
            f"{PPO}::test_value_loss_has_no_gradient_beyond_the_clip_except_towards_it": (
                "the bounds are around the *old* value: beyond them there is no gradient"
            ),
            f"{PPO}::test_value_loss_equals_naive_code": GRADIENT,
        },
        (
            {".square()) / 2": ".square())"},
            {"torch.max": "torch.min"},
            {
                "old_values_T - 0.2, old_values_T + 0.2": "returns_T - 0.2, returns_T + 0.2",
            },
        ),
    ),
    Exercise(
        "importance",
        "common.objectives.importance:importance_weights",
        ("return log_ratio_T.exp().clamp",),
        "Off-policy data",
        """The engine sampled, the trainer learns. log_ratio_T is log(pi_old / pi_engine), [T],
        without gradient. Return the ratio of the two, at most correction.high.""",
        {
            "test_importance_weight_is_above_1_where_the_trainer_is_likelier": (
                "the ratio is inverted"
            ),
            "test_importance_weight_has_an_upper_bound_only": (
                "a ratio is bounded from above, not from below"
            ),
            f"{IMPORTANCE}::test_weights_follow_level_and_bounds": VALUE,
        },
        (
            {"log_ratio_T.exp()": "(-log_ratio_T).exp()"},
            {".clamp(max=correction.high)": ""},
            {"max=correction.high": "max=4.0"},
        ),
    ),
    Exercise(
        "reverse_kl",
        "common.objectives.divergence:reverse_kl",
        ("return",),
        "Distillation",
        """Return KL(p || q) = sum_v p_v log(p_v / q_v) of the student's p and the teacher's q,
        [C].""",
        {
            "test_divergences_are_never_negative": "a divergence is negative",
            "test_reverse_kl_is_a_mean_over_the_student": (
                "the mean is over p: a token with p = 0 costs nothing"
            ),
            f"{DIVERGENCE}::test_values_and_gradients_equal_naive_code[reverse_kl]": GRADIENT,
        },
        (
            {"logp_CV - logq_CV": "logq_CV - logp_CV"},
            {"logp_CV.exp()": "logq_CV.exp()", "logp_CV - logq_CV": "logq_CV - logp_CV"},
            {"logp_CV - logq_CV": "(logp_CV - logq_CV).abs()"},
        ),
    ),
    Exercise(
        "forward_kl",
        "common.objectives.divergence:forward_kl",
        ("return",),
        "Distillation",
        """Return KL(q || p) = sum_v q_v log(q_v / p_v) of the teacher's q and the student's p,
        [C].""",
        {
            "test_divergences_are_never_negative": "a divergence is negative",
            "test_forward_kl_is_a_mean_over_the_teacher": "the mean is over q: this is KL(p || q)",
            f"{DIVERGENCE}::test_values_and_gradients_equal_naive_code[forward_kl]": GRADIENT,
        },
        (
            {"logq_CV - logp_CV": "logp_CV - logq_CV"},
            {"logq_CV.exp()": "logp_CV.exp()", "logq_CV - logp_CV": "logp_CV - logq_CV"},
            {"logq_CV - logp_CV": "(logq_CV - logp_CV).abs()"},
        ),
    ),
    Exercise(
        "pass_at_k",
        "common.evaluate.estimators:pass_at_k",
        ("return",),
        "Advantages by groups",
        """Of n samples c are right. Return the probability that k of them, drawn without
        replacement, include a right one. math.comb(a, b) is the number of ways to choose b of
        a.""",
        {
            f"{EVALUATE}::test_pass_at_1_is_the_fraction_of_right_samples": "pass@1 must be c / n",
            f"{EVALUATE}::test_pass_at_k_does_not_fall_with_k": "more draws cannot lower pass@k",
            f"{EVALUATE}::test_pass_at_n_is_1_with_a_right_sample": (
                "k = n draws all: with c > 0 it must be 1. 1 - (1 - c/n)^k is "
                "for draws with replacement"
            ),
            f"{EVALUATE}::test_pass_at_k_is_the_mean_over_all_subsets": VALUE,
        },
        (
            {"return 1.0 - ": "return "},
            {"1.0 - math.comb(n - c, k)": "math.comb(c, k)"},
            {"math.comb(n - c, k) / math.comb(n, k)": "(1 - c / n) ** k"},
        ),
    ),
]
