"""Each rule of extras/trace/doctor.py names a run beyond its threshold, and is silent about one just below
it; damaged and missing files give one line."""

import ast
import copy
import json
import math
import random
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, call_main

from bench import doctor as bench
from extras.trace import doctor
from extras.trace.file import write
from extras.trace.fragments import replace

EOS = "<|eos|>"


def run(
    folder: Path, script: str = "grpo", flags: dict | None = None, metrics: dict | None = None,
    samples: list[dict] | None = None, groups: list[list[dict]] | None = None,
) -> Path:  # fmt: skip
    """Write the folder of a run: `metrics` by step from 1 on, a trace if there are groups."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"loss": [0.5], **(metrics or {})}
    longest = max(map(len, columns.values()))
    lines = [
        dict(step=t + 1) | {name: values[t] for name, values in columns.items() if t < len(values)}
        for t in range(longest)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "args.yaml").write_text(f"# /somewhere/{script}.py\n{yaml.safe_dump(flags or {})}")
    if samples:
        lines = [json.dumps(sample) + "\n" for sample in samples]
        (folder / "samples.jsonl").write_text("".join(lines))
    if groups:
        header = dict(schema=1, script=script, step=1, flags={}, tokens=[8.0], sequences=[2.0])
        numbered = enumerate(groups)
        traced = [dict(group=i, prompt="12+30=", completions=group) for i, group in numbered]
        write(folder / "trace" / "step_000001.jsonl.gz", [header, *traced])
    return folder


def steps(before: float, after: float, count: int = 30) -> list[float]:
    """Return values of which the first and the last third are constant."""
    third = count // 3
    return [before] * third + [(before + after) / 2] * (count - 2 * third) + [after] * third


def row(text: str = "12+30=|42", start: int = 6, end: str = EOS, **more) -> dict:
    """Return a row of data, one token per character and the end; tokens from `start` on are
    trained."""
    tokens = [*text.replace("|", ""), *([end] if end else [])]
    mask = [1] * (len(tokens) - start)
    return dict(start=start, ids=[*range(len(tokens))], tokens=tokens, mask=mask, fixed={},
                updates=[]) | more  # fmt: skip


def group(rewards: list[float], advantages: list[float], reasons: str = "", **more) -> list[dict]:
    """Return completions with these rewards, advantages and first letters of finish reasons."""
    ends = [dict(s="stop", l="length")[x] for x in reasons or "s" * len(rewards)]
    return [
        row(reward=r, advantage=A, finish_reason=end, **copy.deepcopy(more))
        for r, A, end in zip(rewards, advantages, ends, strict=True)
    ]


def updated(**streams: list[float]) -> dict:
    """Return what a completion has in update 0 beside its three trained tokens."""
    return dict(updates=[dict(update=0) | streams])


def sample(reward: float, text: str, prompt: str = "p", reason: str = "stop") -> dict:
    return dict(step=1, prompt=prompt, completion=text, reward=reward, advantage=0.0,
                finish_reason=reason, version=0)  # fmt: skip


def lengths(rewards: list[float]) -> list[dict]:
    """Return samples of 20 prompts, four of each, with 1, 2, 3 and 4 characters."""
    return [sample(r, "x" * (i + 1), f"p{p}") for p in range(20) for i, r in enumerate(rewards)]


CLIP = dict(loss="clip", clip_low=0.2, clip_high=0.2, dual_clip=0.0, reduction="token",
            old_logprobs="trainer", off_policy_threshold=None, beta=0.0, old_beta=0.0,
            entropy_coef=0.0, correction="none", correction_mode="truncate",
            correction_filter=None)  # fmt: skip
KL = dict(beta=0.1, kl_estimator="k3", kl_clamp=0.0)
OLD = dict(old_logprobs=[-1.0] * 3, rollout_logprobs=[-1.0] * 3, ref_logprobs=[-1.5] * 3)
K3 = math.expm1(-0.5) + 0.5


def shares(x: float) -> list[list[dict]]:
    """Return a group whose tokens have a share x times that of the formula, -A / tokens."""
    parts = [dict(logprobs=[-1.0] * 3, share=[x * -A / 8] * 3) for A in (1.0, -1.0)]
    return [
        group([1.0], [A], fixed=OLD, **updated(**part))
        for A, part in zip((1.0, -1.0), parts, strict=True)
    ]


def clipped(gradient: float) -> list[list[dict]]:
    streams = {"clip_ratio/region_mean": [1, 1, 0], "logprobs_gradient": [gradient, gradient, 1.0]}
    return [group([1.0, 0.0], [1.0, -1.0], fixed=OLD, **updated(**streams))]


def pairs(count: int, wrong: int) -> list[list[dict]]:
    """Return pairs of which `wrong` have the higher advantage for the lower reward."""
    return [group([1.0, 0.0], [-1.0, 1.0] if i < wrong else [1.0, -1.0]) for i in range(count)]


def cuts(wrong: int) -> list[list[dict]]:
    return [group([0.0, 0.0], [-1.0, 1.0] if i < wrong else [1.0, -1.0], "sl") for i in range(4)]


def signs(positive: int) -> list[list[dict]]:
    return [group([1.0, 0.0], [1.0, 0.0 if i < positive else -1.0]) for i in range(10)]


TWICE = row() | dict(tokens=["<|turn|>", "<|turn|>", *"30=42", "<|end|>", "\n"])
ONCE = row() | dict(tokens=["<|turn|>", "u", *"30=42", "<|end|>", "<|end|>"])
REWARD = dict(reward=steps(0.5, 0.47))
CHOSEN = {"logps/rejected": [-20.0] * 30, "rewards/rejected": [-0.1] * 30}
CASES = {  # rule: beyond the threshold, just below it
    "prompt_trained": (dict(script="sft", groups=[[row(start=5)], [row()]]),
                       dict(script="sft", groups=[[row(start=5)], [row()], [row()]])),
    "no_end": (dict(script="sft", groups=[[row(end="")], [row()]]),
               dict(script="sft", groups=[[row(end="")], [row()], [row()]])),
    "special_twice": tuple(dict(script="sft", groups=[[x], [ONCE]]) for x in (TWICE, ONCE)),
    "advantage_sign": (dict(groups=pairs(20, 19)), dict(groups=pairs(20, 18))),
    "penalty_sign": (dict(flags=dict(missing_eos_penalty=1.0), groups=cuts(3)),
                     dict(flags=dict(missing_eos_penalty=1.0), groups=cuts(2))),
    "no_baseline": (dict(groups=signs(9)), dict(groups=signs(8))),
    "first_ratio": (
        dict(groups=[group([1.0], [1.0], **updated(ratio=[1.006] * 3))]),
        dict(groups=[group([1.0], [1.0], **updated(ratio=[1.004] * 3))]),
    ),
    "clipped_gradient": (dict(flags=CLIP, groups=clipped(1e-3)),
                         dict(flags=CLIP, groups=clipped(1e-7))),
    "kl_differs": tuple(
        dict(flags=CLIP | KL,
             groups=[group([1.0], [1.0], fixed=OLD, **updated(logprobs=[-1.0] * 3, kl=[x] * 3))])
        for x in (K3 * 1.02, K3 * 1.005)
    ),
    "share_differs": (dict(flags=CLIP, groups=shares(1.02)),
                      dict(flags=CLIP, groups=shares(1.005))),
    "truncated": (dict(metrics={"completions/clipped_ratio": [0.51]}),
                  dict(metrics={"completions/clipped_ratio": [0.5]})),
    "never_pays": (dict(metrics=dict(reward=[0.0] * 3, reward_std=[0.0] * 3)),
                   dict(metrics=dict(reward=[0.0] * 2 + [0.1], reward_std=[0.0] * 2 + [0.1]))),
    "reward_falls": (dict(metrics=dict(reward=steps(0.5, 0.24))),
                     dict(metrics=dict(reward=steps(0.5, 0.26)))),
    "equal_rewards": (dict(metrics=dict(frac_reward_zero_std=[0.9] * 6)),
                      dict(metrics=dict(frac_reward_zero_std=[0.89] * 6))),
    "engine_differs": (dict(metrics={"sampling/sampling_logp_difference/mean": [0.01, 0.051]}),
                       dict(metrics={"sampling/sampling_logp_difference/mean": [0.01, 0.049]})),
    "rate_high": (dict(metrics=dict(loss=steps(0.1, 0.1), grad_norm=steps(1.0, 21.0))),
                  dict(metrics=dict(loss=steps(0.1, 0.1), grad_norm=steps(1.0, 19.0)))),
    "rate_low": tuple(
        dict(script="sft", metrics=dict(loss=steps(5.0, x), grad_norm=steps(1.0, 1.1)))
        for x in (4.96, 4.94)
    ),
    "falls_unsolved": tuple(
        dict(metrics={"mean_token_accuracy": steps(0.1, x), "eval/solved": [0.0, 0.02]})
        for x in (0.91, 0.89)
    ),
    "scores_equal": tuple(
        dict(script="rm", metrics={"rewards/margins": steps(0, x), "rewards/std": steps(1, 1)})
        for x in (0.04, 0.06)
    ),
    "displaced": tuple(
        dict(script="dpo", flags=dict(beta=0.1),
             metrics=CHOSEN | {"rewards/chosen": [x / 10] * 30, "logps/chosen": [-30 + x] * 30})
        for x in (-6.1, -5.9)
    ),
    "value_lags": (dict(script="ppo", metrics=dict(explained_variance=steps(-3, -0.21))),
                   dict(script="ppo", metrics=dict(explained_variance=steps(-3, -0.19)))),
    "entropy_collapse": (dict(metrics=REWARD | dict(entropy=steps(1.0, 0.09))),
                         dict(metrics=REWARD | dict(entropy=steps(1.0, 0.11)))),
    "length_drift": (dict(metrics=REWARD | {"completions/mean_length": steps(10, 15.1)}),
                     dict(metrics=REWARD | {"completions/mean_length": steps(10, 14.9)})),
    "likes_length": (dict(samples=lengths([0, 0, 1, 1])), dict(samples=lengths([0, 1, 0, 1]))),
    "clipped_often": (dict(metrics={"clip_ratio/region_mean": [0.31] * 3}),
                      dict(metrics={"clip_ratio/region_mean": [0.29] * 3})),
    "stale": tuple(
        dict(metrics={"sampling/staleness/mean": [x], "sampling/kept_fraction": [1.0]})
        for x in (4.1, 3.9)
    ),
}  # fmt: skip
RULES = {rule.__name__: rule for rule in doctor.RULES}


def test_every_rule_is_tested():
    assert RULES.keys() == CASES.keys() | {"judge_differs"}


@pytest.mark.parametrize("name", CASES)
def test_rule_names_what_is_beyond_its_threshold(name, tmp_path):
    beyond, below = (run(tmp_path / str(i), **case) for i, case in enumerate(CASES[name]))
    report = doctor.examine(beyond)
    assert name in [finding.rule for finding in report.findings]
    assert RULES[name](doctor.read_case(below)) is None


def test_a_loss_that_rose_and_fell_again_is_named(tmp_path):
    for peak, found in ((7.6, True), (7.5, False)):
        metrics = dict(loss=[5.0] * 5 + [peak] * 5 + [2.0] * 20, grad_norm=[1.0] * 30)
        case = doctor.read_case(run(tmp_path / str(peak), "sft", metrics=metrics))
        assert (RULES["rate_high"](case) is not None) == found


def judged(tmp_path, tokenizer: bool = True):
    model = tmp_path / "rm"
    model.mkdir()
    (model / "model.safetensors").write_text("damaged")
    if tokenizer:
        (model / "tokenizer.json").write_text("x")
    traced = [row(reward=i, advantage=0.0, finish_reason="stop", model=i) for i in range(8)]
    for i, completion in enumerate(traced):
        completion["ids"] = [*completion["ids"][:-1], i]
    folder = run(
        tmp_path / "run", flags=dict(reward=[f"model:{model}"], model="m"), groups=[traced]
    )
    (folder / "hf").mkdir()
    (folder / "hf" / "tokenizer.json").write_text("x")
    return doctor.read_case(folder)


def test_rewards_are_compared_with_the_scores_of_their_model(tmp_path, monkeypatch):
    case = judged(tmp_path)
    monkeypatch.setattr(doctor, "scores", lambda _, of: [2.0 * ids[-1] for ids in of])
    assert doctor.judge_differs(case) is None
    monkeypatch.setattr(doctor, "scores", lambda _, of: [float(ids[-1] % 2) for ids in of])
    assert "correlation" in doctor.judge_differs(case).text


def test_healthy_run_gives_one_line_that_says_what_is_unchecked(tmp_path):
    (line,) = doctor.examine(run(tmp_path, metrics=dict(reward=[0.1, 0.2]))).lines()
    assert line.startswith("nothing found: ") and "no traces" in line and "too few steps" in line


def test_finding_has_numbers_step_examples_and_remedy(tmp_path):
    samples = [sample(0.0, "1" * i, reason="length") for i in range(5)]
    metrics = {"completions/clipped_ratio": [0.2, 0.8]}
    folder = run(tmp_path, flags=dict(max_new_tokens=4), metrics=metrics, samples=samples)
    first, *lines = doctor.examine(folder).lines()
    assert first == "truncated, step 2: 80% of the completions reach --max_new_tokens 4"
    assert lines[:3] == ["    'p -> 11'", "    'p -> 111'", "    'p -> 1111'"]
    assert "`--max_new_tokens`" in lines[3]


def test_unfinished_lines_of_a_running_run_are_left_out(tmp_path):
    folder = run(tmp_path, samples=[sample(0.0, "a")])
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"step": 2, "lo')
    assert len(doctor.read_case(folder).samples) == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "args.yaml", "samples.jsonl", "trace"])
def test_damaged_or_missing_file_gives_one_line(name, tmp_path, monkeypatch, capsys):
    folder = run(tmp_path, samples=[sample(0.0, "a")], groups=pairs(1, 0))
    path = folder / "trace" / "step_000001.jsonl.gz" if name == "trace" else folder / name
    path.write_bytes(b"{damaged\n")
    for _ in range(2 if name in ("metrics.jsonl", "args.yaml") else 1):
        _, error = call_main(doctor.main, ["doctor", folder], 2, monkeypatch, capsys)
        assert error.count("\n") == 1 and str(path) in error
        path.unlink(missing_ok=True)


def test_rule_that_cannot_read_a_run_is_named_and_the_others_apply(tmp_path):
    metrics = {"completions/clipped_ratio": [0.8]}
    report = doctor.examine(run(tmp_path, flags=dict(reward=3), metrics=metrics))
    assert [finding.rule for finding in report.findings] == ["truncated"]
    assert "judge_differs: TypeError" in report.lines()[-1]


def test_page_has_the_rows_of_the_rules():
    text = doctor.PAGE.read_text()
    assert doctor.page(text) == text
    assert all(all(doctor.row_of(rule)) for rule in doctor.RULES)


def test_bench_has_twenty_bugs_whose_code_stands_in_one_place():
    assert len(bench.NAMES) == len({bug.name for bug in [*bench.BUGS, *bench.OWN]}) == 20
    assert set(bench.NAMES.values()) <= RULES.keys()
    for bug in (bug for bug in bench.OWN if bug.file):
        text = replace(bug.before, bug.after, (ROOT / bug.file).read_text(), bug.name)
        compile(text, bug.file, "exec")


def test_rules_are_short():
    for name in ("doctor", "doctor_rules"):
        tree = ast.parse((ROOT / "extras/trace" / f"{name}.py").read_text())
        rules = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name in RULES]
        lines = {x.name: x.end_lineno - x.body[0].end_lineno for x in rules}
        assert {name: n for name, n in lines.items() if n > 15} == {}


# ---- healthy runs that look like a fault ----

FELL = {"rewards/chosen": [-0.61] * 30, "logps/chosen": [-36.1] * 30,
        "logps/rejected": [-20.0] * 30, "rewards/rejected": [-0.1] * 30}  # fmt: skip
EQUAL = dict(metrics=dict(frac_reward_zero_std=[1.0] * 6))
CUT = {"clip_ratio/region_mean": [0.9] * 3}
GAP = {"sampling/sampling_logp_difference/mean": [0.06]}


def apply(rule: str, folder, **case):
    return RULES[rule](doctor.read_case(run(folder, **case)))


UNCHECKED = [
    ("prompt_trained", dict(script="sft", flags=dict(train_on="all"), groups=[[row(start=5)]])),
    ("penalty_sign", dict(script="ppo", flags=dict(missing_eos_penalty=1.0), groups=cuts(4))),
    ("displaced", dict(script="dpo", flags=dict(beta=0.1, loss=["cpo"]), metrics=FELL)),
    ("displaced", dict(script="online_dpo", flags=dict(beta=0.1, loss=["cpo"]), metrics=FELL)),
    ("displaced", dict(script="dpo", flags=dict(beta=0.1, loss=["simpo"]), metrics=FELL)),
    ("equal_rewards", dict(script="self_distill", **EQUAL)),
    ("equal_rewards", dict(script="distill", **EQUAL)),
    ("equal_rewards", dict(script="ppo", **EQUAL)),
    ("equal_rewards", dict(script="reinforce", **EQUAL)),
    ("clipped_often", dict(script="gspo", metrics=CUT)),
    ("clipped_often", dict(script="rloo", metrics=CUT)),
    ("engine_differs", dict(flags=dict(old_logprobs="engine"), metrics=GAP)),
]


@pytest.mark.parametrize("rule,case", UNCHECKED)
def test_rule_is_unchecked_where_it_cannot_be_right(rule, case, tmp_path):
    with pytest.raises(doctor.Unchecked, match=doctor.NOT_HERE):
        apply(rule, tmp_path, **case)


def test_dpo_that_displaces_is_named_by_the_same_numbers(tmp_path):
    assert apply("displaced", tmp_path, script="dpo", flags=dict(beta=0.1), metrics=FELL)


@pytest.mark.parametrize("end", ["[|endofturn|]", "</s>", "<|im_end|>", "<turn|>", "[/INST]",
                                 "<｜end▁of▁sentence｜>", "<end_of_utterance>"])  # fmt: skip
def test_end_tokens_of_the_families_are_end_tokens(end, tmp_path):
    assert apply("no_end", tmp_path, script="sft", groups=[[row(end=end)]]) is None


def test_rows_at_the_fitted_length_need_no_end(tmp_path, monkeypatch):
    folder = run(tmp_path, "sft", dict(max_length=None), groups=[[row(end="")]])
    case = doctor.read_case(folder)
    assert RULES["no_end"](case)
    case.traces[0][0]["flags"]["max_length"] = len(row(end="")["ids"])
    with pytest.raises(doctor.Unchecked):
        RULES["no_end"](case)


def noisy(seed: int, count: int, loss) -> list[float]:
    rng = random.Random(seed)
    return [loss(t / count) + rng.gauss(0, 0.15) for t in range(count)]


@pytest.mark.parametrize("count", [30, 60, 300, 2000])
def test_noise_is_no_high_learning_rate(count, tmp_path):
    alarms = 0
    for seed in range(20):
        losses = noisy(seed, count, lambda x: 1.2 - 0.2 * x)
        metrics = dict(loss=losses, grad_norm=[1.0] * count)
        alarms += (
            apply("rate_high", tmp_path / str(seed), script="sft", metrics=metrics) is not None
        )
    assert alarms == 0


@pytest.mark.parametrize("zeros", [30, 29])
def test_zero_gradients_at_first_are_no_high_learning_rate(zeros, tmp_path):
    norms = [0.0] * zeros + [1.0] * (90 - zeros)
    assert apply("rate_high", tmp_path, metrics=dict(loss=[0.0] * 90, grad_norm=norms)) is None


def test_loss_that_falls_within_the_first_steps_is_no_low_learning_rate(tmp_path):
    losses = [max(1.0, 1.25 - 0.0025 * t) for t in range(3000)]
    metrics = dict(loss=losses, grad_norm=[1.0] * 3000)
    assert apply("rate_low", tmp_path, script="sft", metrics=metrics) is None


def test_kl_near_zero_is_a_low_learning_rate(tmp_path):
    for kl, found in ((9e-6, True), (1.1e-5, False)):
        seen = apply("rate_low", tmp_path / str(kl), metrics=dict(kl=[kl] * 30))
        assert (seen is not None) == found


@pytest.mark.parametrize("end,found", [(4.9, True), (5.1, False)])
def test_length_that_shrinks_while_the_reward_falls_is_named(end, found, tmp_path):
    metrics = dict(reward=steps(0.5, 0.4)) | {"completions/mean_length": steps(10, end)}
    assert (apply("length_drift", tmp_path, metrics=metrics) is not None) == found


@pytest.mark.parametrize("reward", [steps(1.0, 1.0), steps(0.98, 0.978)], ids=["solved", "noise"])
def test_solved_run_may_lose_entropy(reward, tmp_path):
    metrics = dict(reward=reward, entropy=steps(1.0, 0.01))
    assert apply("entropy_collapse", tmp_path, metrics=metrics) is None


@pytest.mark.parametrize("limit,gap", [(None, 0.05), (1e9, 0.05), (1.0, 0.1)])
def test_gap_to_the_engine_is_compared_with_the_limit_of_the_run(limit, gap, tmp_path):
    for factor in (0.9, 1.1):
        metrics = {"sampling/sampling_logp_difference/mean": [factor * gap]}
        flags = dict(dtype="bfloat16", max_logprob_difference=limit)
        seen = apply("engine_differs", tmp_path / str(factor), flags=flags, metrics=metrics)
        assert (seen is not None) == (factor > 1)


def test_few_kept_tokens_are_stale_only_if_some_are_old(tmp_path):
    for age, found in ((0.1, True), (0.0, False)):
        metrics = {"sampling/staleness/mean": [age], "sampling/kept_fraction": [0.4]}
        assert (apply("stale", tmp_path / str(age), metrics=metrics) is not None) == found


def test_damaged_reward_model_is_unchecked(tmp_path):
    from transformers import AutoConfig

    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    names = ["LlamaForSequenceClassification"]
    config = AutoConfig.for_model("llama", vocab_size=32, architectures=names, **sizes)
    config.save_pretrained(tmp_path / "c")
    case = judged(tmp_path)
    (tmp_path / "rm" / "config.json").write_text((tmp_path / "c" / "config.json").read_text())
    with pytest.raises(doctor.Unchecked, match="cannot be read"):
        doctor.judge_differs(case)


def test_reward_model_without_tokenizer_is_unchecked(tmp_path):
    with pytest.raises(doctor.Unchecked):
        doctor.judge_differs(judged(tmp_path, tokenizer=False))


def test_equal_scores_are_unchecked(tmp_path, monkeypatch):
    case = judged(tmp_path)
    monkeypatch.setattr(doctor, "scores", lambda _, of: [0.5] * len(of))
    with pytest.raises(doctor.Unchecked):
        doctor.judge_differs(case)


def test_long_trace_is_thinned(tmp_path):
    long = row(text="12+30=|" + "4" * 5000)
    long |= dict(reward=1.0, advantage=1.0, finish_reason="stop", fixed={})
    long |= updated(ratio=[1.0] * len(long["mask"]))
    case = doctor.read_case(run(tmp_path, groups=[[long]]))
    assert 20 <= len([*doctor.tokens_of(case, "ratio")]) <= 2000
    assert RULES["first_ratio"](case) is None


def test_remedy_does_not_send_dapo_to_itself(tmp_path):
    report = doctor.examine(run(tmp_path, "dapo", dict(lr=1.0, samples_per_prompt=8), **EQUAL))
    (finding,) = [x for x in report.findings if x.rule == "equal_rewards"]
    assert "dapo.py" not in finding.remedy
