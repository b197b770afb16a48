"""The patches of course/changes apply to the scripts, are short, equal their formulas, and change
the metrics of a short run as described."""

import ast
import importlib
import math
import re
import runpy
import shutil
import statistics
import subprocess
import sys
from itertools import chain, combinations, groupby
from pathlib import Path

import pytest
import torch
from helpers import (
    ROOT,
    assert_resumes_exactly,
    completion,
    metrics,
    samples,
    weights,
    write,
    write_rows,
)
from hypothesis import given
from in_process import talkative
from naive import check, rows
from processes import run
from test_grpo_objective import (
    IDS,
    MASK,
    SEQUENCES,
    TOKENS,
    naive_clip,
    stream,
    streams,
    tokens,
)
from transformers import AutoModelForCausalLM

import grpo
from common.model.tiny import tiny_model
from common.objectives.reduction import sequence_mean

PATCHES = sorted(ROOT.glob("course/changes/*.patch"))
SHORT = (
    "--max_steps", 3, "--eval_every", 0, "--prompts_per_step", 4, "--samples_per_prompt", 4,
    "--engine", "transformers", "--max_new_tokens", 4,
)  # fmt: skip
FLAGS = {
    "curriculum": ("--save_every", 1),
    "deepseek": ("--beta", 0.1, "--off_policy_threshold", 0.01, "--minibatches", 2),
    "gdpo": ("--missing_eos_penalty", 0.1),
    "gfpo": ("--gfpo_keep", 2),
    "new-advantage": ("--advantage", "median"),
    "new-divergence": ("--divergence", "skewed_kl", "--teacher", "tiny-sft"),
    "new-loss": ("--loss", "spo"),
    "pass-at-k": ("--advantage", "pass_at_k", "--samples_per_prompt", 5),
    "positive-nll": ("--positive_nll", 0.1),
    "reference-sync": ("--beta", 0.1, "--sync_every", 2, "--lr", 1e-3, "--warmup_steps", 0),
    "teacher": ("--teacher", "tiny", "--beta", 0.5, "--kl_estimator", "k2"),
    "turn-credit": ("--max_new_tokens", 120, "--max_turns", 3, "--reward", "environment"),
    "value-model": ("--lr", 1e-4, "--epochs_per_rollout", 4, "--warmup_steps", 0),
    "vespo": ("--loss", "vespo", "--reduction", "sequence"),
}
TWICE = """
class Twice:
    def __init__(self): self.turns = 0
    def reset(self, row): return [{"role": "user", "content": row["prompt"]}]
    def step(self, completion):
        self.turns += 1
        reward = len(completion) % 3 if self.turns == 1 else 0
        return [{"role": "user", "content": "again!"}], reward, self.turns == 2
"""
NAN = math.nan
GROUPS = ([1.0, 0.0, NAN, 0.0, 1.0], [0.25, 3.0, 0.25, 0.0, 1.5], [0.1] * 5)


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def script_of(patch: Path) -> Path:
    return ROOT / patch.read_text().split()[1].removeprefix("a/")


@pytest.fixture
def patched(tmp_path, monkeypatch):
    """`patched(name)` returns the name of a module: a script with a patch."""
    monkeypatch.syspath_prepend(tmp_path)

    def patch(name: str) -> str:
        module, file = f"changed_{name.replace('-', '_')}", ROOT / f"course/changes/{name}.patch"
        script = tmp_path / f"{module}.py"
        script.write_text(script_of(file).read_text())
        subprocess.run(["patch", script, file], check=True, capture_output=True)
        return module

    return patch


def test_every_patch_is_listed_and_has_at_most_15_changed_lines():
    page = (ROOT / "course/changes/README.md").read_text()
    assert len(PATCHES) == 21
    for patch in PATCHES:
        lines = patch.read_text().splitlines()[2:]
        changed = [line for line in lines if line[0] in "+-" and line[1:].strip()]
        assert len(changed) <= 15 and f"({patch.name})" in page
        done = subprocess.run(
            ["patch", "--dry-run", script_of(patch), patch], capture_output=True, text=True
        )
        assert done.returncode == 0 and "offset" not in done.stdout and "fuzz" not in done.stdout


def test_pairs_of_patches_apply_in_both_orders_but_for_those_that_the_page_names(tmp_path):
    page = (ROOT / "course/changes/README.md").read_text()
    listed = re.search(r"These pairs do not combine: (.*?)\. ", page, re.DOTALL)[1]
    clauses = [re.findall(r"`([\w-]+)`", clause) for clause in listed.split(";")]
    named = {frozenset((first, other)) for first, *others in clauses for other in others}
    copy, failed = tmp_path / "mine.py", set()
    for first in PATCHES:
        once = tmp_path / f"{first.stem}.py"
        subprocess.run(["patch", "-s", "-o", once, script_of(first), first], check=True)
        for second in PATCHES:
            if second != first and script_of(second) == script_of(first):
                command = ["patch", "-s", "-r", "-", "-o", copy, once, second]
                if subprocess.run(command, capture_output=True).returncode:
                    failed.add(frozenset((first.stem, second.stem)))
                elif first < second:
                    ast.parse(copy.read_text())
    assert failed == named


def test_a_loss_and_an_advantage_of_two_patches_are_both_choices(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    names = ("new-advantage", "vespo", "pass-at-k", "new-loss")
    shutil.copy(ROOT / "grpo.py", script := tmp_path / "mine_of_four.py")
    for name in names:
        patch = ROOT / f"course/changes/{name}.patch"
        subprocess.run(["patch", script, patch], check=True, capture_output=True)
    mine = importlib.import_module("mine_of_four")
    assert {"median", "pass_at_k"} < {*mine.ADVANTAGES} and {"spo", "vespo"} < {*mine.LOSSES}
    assert not {"median", "pass_at_k"} & {*grpo.ADVANTAGES} and "spo" not in grpo.LOSSES


# ---- formulas ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "table", "name", "wrong", "said"),
    [
        ("loss", "LOSSES", "spo", lambda right, x: right(x._replace(A_T=x.A_T * 1.01)), r"\(-"),
        ("advantage", "ADVANTAGES", "median", lambda right, x: right(x) * 1.01, r"\["),
    ],
)
def test_naive_code_agrees_with_a_change_and_finds_an_error_in_it(
    kind, table, name, wrong, said, tmp_path, monkeypatch
):
    shutil.copy(ROOT / "grpo.py", script := tmp_path / "mine.py")
    patch = ROOT / f"course/changes/new-{kind}.patch"
    subprocess.run(["patch", script, patch], check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    naive = runpy.run_path(str(ROOT / f"course/changes/naive_{kind}.py"))
    compare = naive[f"test_{kind}_equals_naive_code"]
    compare()
    mine = getattr(importlib.import_module("mine"), table)
    right = mine[name]
    monkeypatch.setitem(mine, name, lambda x: wrong(right, x))
    with pytest.raises(AssertionError, match=said):
        compare()


def naive_gain(group, i, k):
    """Return k times the best of i and k - 1 others, less the best of k others, on average."""
    others = [r for j, r in enumerate(group) if j != i and not math.isnan(r)]
    if math.isnan(group[i]) or len(others) < k:
        return 0.0
    with_it = [max(group[i], *chosen) for chosen in combinations(others, k - 1)]
    without = [max(chosen) for chosen in combinations(others, k)]
    return k * (statistics.fmean(with_it) - statistics.fmean(without))


def test_pass_at_k_is_the_gain_of_the_best_of_k(patched):
    pass_at_k = importlib.import_module(patched("pass-at-k")).pass_at_k
    for k in (2, 3, 4):
        expected = [[naive_gain(group, i, k) for i in range(5)] for group in GROUPS]
        torch.testing.assert_close(pass_at_k(double(GROUPS), k), double(expected))
    assert (pass_at_k(double(GROUPS[2:])) == 0).all()


def test_opo_subtracts_the_mean_reward_of_a_token(patched):
    opo, lengths = importlib.import_module(patched("opo")).opo, [3, 1, 8, 2, 6]
    got = []
    for group in GROUPS:
        tokens = [r for r, n in zip(group, lengths, strict=True) for _ in range(n) if r == r]
        mean = statistics.fmean(tokens)
        expected = [0.0 if math.isnan(r) else r - mean for r in group]
        got = opo(double([group]), torch.tensor([lengths]))[0].tolist()
        assert got == pytest.approx(expected, abs=1e-12)
    assert got == [0.0] * 5  # equal rewards


def test_gdpo_normalises_each_reward_then_their_sum(patched):
    """A completion without a total reward counts in no statistic."""
    each = double([GROUPS[:2], [[2.0, 0.0, 1.0, 0.0, 0.5], [NAN, 9.0, 7.0, 7.0, 9.0]]])
    total, weights = each.nansum(0), [1.0, 0.5]
    total[0, 2] = NAN
    gdpo = importlib.import_module(patched("gdpo")).gdpo
    got = gdpo(total, each, weights)
    each[:, 0, 2] = NAN
    sums = sum(w * grpo.advantages(rewards) for w, rewards in zip(weights, each, strict=True))
    std = statistics.stdev(sums[~total.isnan()].tolist())
    torch.testing.assert_close(got, sums / (std + 1e-6))
    assert got[0, 2] == 0 and got[~total.isnan()].mean().abs() < 1e-9
    lone = double([[1.0, NAN]])
    assert gdpo(lone, lone[None], [1.0]).tolist() == [[0.0, 0.0]]


def test_vespo_weights_a_completion_by_a_smooth_function_of_its_ratio(patched):
    some = [([(-1.0, -1.4, True), (-0.5, -9.0, False), (-2.0, -1.0, True)], 1.5),
            ([(-0.3, -1.1, True)], -0.7)]  # fmt: skip
    x = stream(some, 0.0, 0.0)
    losses_T = importlib.import_module(patched("vespo")).vespo(x).loss_T * x.mask_T
    first, second = math.exp(0.4 - 1.0), math.exp(0.8)
    first = first**2 * math.exp(3 * (1 - first)) * 1.5
    second = second**3 * math.exp(2 * (1 - second)) * -0.7
    expected = [-first * -1.0, 0.0, -first * -2.0, -second * -0.3]
    assert losses_T.tolist() == pytest.approx(expected)
    slopes = torch.autograd.grad(losses_T.sum(), x.logprobs_T)[0].tolist()
    assert slopes == pytest.approx([-first, 0.0, -first, -second])


@pytest.mark.parametrize("threshold", [0.01, 9.0])
def test_deepseek_masks_and_weighs_the_kl(patched, threshold):
    script = importlib.import_module(patched("deepseek"))
    new, old, engine, ref, entropy = streams()
    A = torch.where(IDS == 0, -1.0, torch.where(IDS == 1, -0.5, 1.0)).double()
    rest = entropy, A, MASK, IDS, TOKENS, SEQUENCES
    flags = dict(beta=0.3, kl_estimator="k3")
    plain, kl = (grpo.loss(new, old, engine, ref, *rest, grpo.Args(beta=b)) for b in (0.0, 0.3))
    args = script.Args(off_policy_threshold=threshold, **flags)
    share_T, logged = script.loss(new, old, engine, ref, *rest, args)
    keeps_T = (A >= 0) | (sequence_mean(engine - new, MASK, IDS) <= threshold)
    kl_T = (new - old).exp() * kl[1]["kl"]
    torch.testing.assert_close(logged["kl"], kl_T)
    expected_T = plain[0] * keeps_T + (0.3 * kl_T) * MASK / TOKENS
    torch.testing.assert_close(share_T, expected_T)
    assert keeps_T.all() == (threshold == 9.0)


def naive_dual_clip(new, old, a):
    return (
        (-3 * a, 0.0) if a < 0 and math.exp(new - old) > 3 else naive_clip(new, old, a, 0.2, 0.28)
    )


def test_dual_clip_bounds_the_loss_of_bad_tokens(patched):
    clip = importlib.import_module(patched("dual-clip")).LOSSES["clip"]

    @given(rows)
    def equals_naive_code(tokens_of_a_batch):
        check(lambda *x: clip(tokens(*x)).loss_T, naive_dual_clip, tokens_of_a_batch)

    equals_naive_code()
    x = tokens(double([0.0, 0.0, 0.0]), double([-1.0, -1.2, -1.2]), double([-1.0, -1.0, 1.0]))
    assert clip(x).stopped_T.tolist() == [False, True, True]  # rho is 2.7, 3.3, 3.3


def naive_turns(rewards_of_turns, k, i):
    """Return the rewards of completion i from turn k on, less their mean over the completions that
    have this turn, over their standard deviation."""
    left = [sum(rewards[k:]) if k < len(rewards) else NAN for rewards in rewards_of_turns]
    peers = [x for x in left if not math.isnan(x)]
    if math.isnan(left[i]) or len({*peers}) == 1:
        return 0.0
    return (left[i] - statistics.fmean(peers)) / (statistics.stdev(peers) + 1e-6)


def test_turn_credit_compares_the_rewards_to_come_of_equal_turns(patched):
    """The last of the rewards of a completion has no place of its own: a function or a penalty may
    add to it."""
    script = importlib.import_module(patched("turn-credit"))
    for turns in (
        [[1.0, 0.5, 0.0], [0.0, 0.5], [2.0, 0.0, 0.25], [0.5]],
        [[1.0]] * 4,
        [[0.3], [1.0]],
    ):
        group = [completion(8) for _ in turns]
        for sample, rewards in zip(group, turns, strict=True):
            ends = [3, 5, 9][: len(rewards) - 1] + [9]
            sample.turn_rewards = [(i, r / 0.5) for i, r in zip(ends, rewards, strict=True)]
        totals = double([sum(rewards) for rewards in turns])
        got = script.turn_advantages(group, totals, 0.5)
        for k, i in ((k, i) for k in range(len(got)) for i in range(len(turns))):
            assert got[k, i].item() == pytest.approx(naive_turns(turns, k, i), abs=1e-9)
    torch.testing.assert_close(got, grpo.advantages(totals[None]))  # one turn


def test_early_stopping_counts_evaluations_since_the_best(patched):
    script = importlib.import_module(patched("early-stop"))
    args = script.Args(stop_at=0.9, patience=2)
    seen = script.Solved()
    assert not seen.is_over(args)
    over = []
    for solved in (0.2, 0.1, 0.3, 0.3, 0.2):
        seen.append(solved)
        over.append(seen.is_over(args))
    assert over == [False, False, False, False, True]
    again = script.Solved()
    again.load_state_dict(seen.state_dict())
    assert again.is_over(args) and not again.is_over(script.Args(patience=3))
    assert script.Solved([0.1, 0.9]).is_over(args)


# ---- runs ----


def traced(folder: Path) -> list[dict]:
    """Return the completions in the trace of the first step."""
    trace_file = pytest.importorskip("extras.trace.file")
    _, *groups = trace_file.read(folder / "trace" / "step_000001.jsonl.gz")
    return [*chain.from_iterable(group["completions"] for group in groups)]


@pytest.mark.slow
@pytest.mark.parametrize("patch", [path.stem for path in PATCHES])
def test_patched_script_runs(patch, patched, small, reward_file, main, tmp_path):
    name, folder = patched(patch), tmp_path / "run"
    flags = (*small, *SHORT, *FLAGS.get(patch, ()), "--output_dir", folder)
    if patch in ("gfpo", "gdpo", "reference-sync"):
        flags += ("--reward", f"{reward_file}:digits")
    if patch == "gdpo":
        flags += (f"{reward_file}:longer",)
    if patch == "curriculum":
        code = (
            "def odd(completion, row): return len(completion) if int(row['answer']) % 2 else None"
        )
        flags += ("--reward", f"{write(tmp_path / 'odd.py', code)}:odd")
    if patch == "turn-credit":
        environment = write(tmp_path / "twice.py", TWICE)
        dataset = write_rows(tmp_path / "rows.jsonl", [dict(prompt="?")] * 8)
        model = talkative(tmp_path / "model", small[1])
        flags += ("--model", model, "--dataset", dataset, "--environment", f"{environment}:Twice")
    if patch == "value-model":
        code = "def one(completion, row): return 1.0"
        flags += ("--reward", f"{write(tmp_path / 'one.py', code)}:one")
    if patch in ("curriculum", "muon"):
        run(2, tmp_path / f"{name}.py", *flags)
    else:
        main(name, *flags)
    lines = [line for line in metrics(folder) if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(math.isfinite(line["loss"]) for line in lines)
    if patch == "curriculum":  # a group without rewards keeps its old mean
        states = [path.read_text() for path in folder.glob("checkpoints/*/state.json")]
        assert states and not any("NaN" in state for state in states)
    if patch == "model-as-reward":
        assert all(line["reward"] < -1 for line in lines)
    if patch == "token-advantage":
        for each in traced(folder):
            decay = [0.9**count for count in reversed(range(len(each["mask"])))]
            expected = [each["advantage"] * x for x in decay]
            assert each["fixed"]["advantages"] == pytest.approx(expected)
    if patch == "teacher":
        teacher = AutoModelForCausalLM.from_pretrained(tiny_model())
        for each in traced(folder):
            ids = torch.tensor([each["ids"]])
            logps = teacher(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            got = each["updates"][0]
            assert each["fixed"]["ref_logprobs"] == pytest.approx(
                logps[each["start"] - 1 :].tolist(), abs=1e-4
            )
            distances = zip(got["logprobs"], each["fixed"]["ref_logprobs"], strict=True)
            assert got["kl"] == pytest.approx([(x - y) ** 2 / 2 for x, y in distances], abs=1e-5)
        first = lines[0]
        assert first["kl"] > 0.01 and first["loss"] == pytest.approx(0.5 * first["kl"], abs=1e-5)
    if patch == "reference-sync":
        kls = [line["kl"] for line in lines]
        assert kls[0] == kls[2] == pytest.approx(0, abs=1e-9) and kls[1] > 1e-6
    if patch == "turn-credit":  # only the first of two turns has a reward
        unequal = 0
        for each in traced(folder):
            advantages = each["fixed"]["advantages"]
            tokens_of_turns = groupby(zip(each["mask"], advantages, strict=True), lambda x: x[0])
            turns = [{*list(zip(*turn, strict=True))[1]} for mask, turn in tokens_of_turns if mask]
            assert turns[1:] in ([{0.0}], []) and len(turns[0]) == 1
            assert turns[0].pop() == pytest.approx(each["advantage"], abs=1e-5)
            unequal += len(turns) == 2 and each["advantage"] != 0
        assert unequal
    if patch == "value-model":  # all rewards are 1, and the group has no advantage
        losses = []  # before each of four updates
        for each in traced(folder):
            losses.append([sum(update["value_loss"]) for update in each["updates"]])
            expected = [(1 - v) ** 2 / 2 for v in each["fixed"]["values"]]
            assert each["updates"][0]["value_loss"] == pytest.approx(expected, abs=1e-5)
        totals = [sum(each) for each in zip(*losses, strict=True)]
        assert totals[3] < totals[0]
    if patch == "gfpo":
        trained = [line["advantage"] != 0 for line in samples(folder)]
        groups = list(zip(*[iter(trained)] * 4, strict=True))
        assert any(map(any, groups)) and all(sum(group) <= 2 for group in groups)
    if patch == "gdpo":
        advantages = [line["advantage"] for line in samples(folder, 1)]
        assert statistics.stdev(advantages) == pytest.approx(1, abs=1e-3)
    if patch == "metric-per-group":
        assert all("groups/reward_range" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("patch", ["reference-sync", "value-model"])
def test_a_run_with_a_second_model_resumes_exactly(
    patch, patched, small, reward_file, main, tmp_path
):
    flags = (*small, *SHORT, *FLAGS[patch], "--save_every", 2, "--trace_every", 0)
    flags += ("--reward", f"{reward_file}:digits")
    main(name := patched(patch), *flags, "--output_dir", tmp_path / "run")
    assert_resumes_exactly(main, name, *flags, folder=tmp_path / "run", finished=3)


@pytest.mark.slow
def test_early_stopping_ends_a_resumed_run_at_the_same_step(patched, small, main, tmp_path):
    """Nothing is solved: the second evaluation is no better than the first."""
    flags = (*small, *SHORT, "--max_steps", 6, "--eval_every", 1, "--eval_size", 4)
    flags += ("--save_every", 1, "--patience", 1, "--trace_every", 0)
    main(name := patched("early-stop"), *flags, "--output_dir", tmp_path / "run")
    assert metrics(tmp_path / "run")[-1]["step"] == 2
    before = weights(tmp_path / "run")
    main(name, *flags, "--output_dir", tmp_path / "run")  # it is over
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000002")
    main(name, *flags, "--output_dir", tmp_path / "run")
    assert metrics(tmp_path / "run")[-1]["step"] == 2
    assert all(x.equal(before[name]) for name, x in weights(tmp_path / "run").items())
