"""The viewer in a browser: its numbers against those of the scripts, hostile text, keyboard, live
runs, bad input.

The runs are written by hand. Their shares of the loss come from the `loss` functions of the
scripts."""

import gzip
import json
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from helpers import PATIENCE, ROOT, call_main

import bok
import dapo
import distill
import dpo
import grpo
import gspo
import kto
import ppo
import reinforce
import rloo
import rm
import sft
from common.config.groups import flags_of
from common.objectives.importance import importance_weights
from common.objectives.preference import Pairs, implicit_rewards, rewards_per_token
from extras.trace import file as trace_file

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is missing: pip install playwright"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is missing: apt-get install chromium"),
]
VIEW = ROOT / "extras/trace/view.py"
module = runpy.run_path(str(VIEW), run_name="view")
HOSTILE = "</script><img src=x onerror=alert(1)>"

# ---- runs written by hand ----

MASK = torch.tensor([1, 1, 0, 1, 1, 1, 1]).bool()  # of two completions: 4 tokens, then 3
IDS = torch.tensor([0, 0, 0, 0, 1, 1, 1])
OLD = torch.tensor([-0.5, -1.25, -9.0, -0.125, -2.5, -0.75, -1.5], dtype=torch.float64)
NEW = OLD + torch.tensor([0.5, -0.4, 3.0, 0.03, 0.6, -0.3, 0.01], dtype=torch.float64)
ROLLOUT = OLD - torch.tensor([0.02, -0.9, 0.0, 0.01, 0.3, -0.01, 1.5], dtype=torch.float64)
REF = OLD + torch.tensor([0.25, 0.1, 0.0, -0.2, -0.5, 0.3, 0.0], dtype=torch.float64)
ENTROPY = torch.tensor([0.5, 0.25, 1.0, 0.75, 2.0, 1.5, 0.125], dtype=torch.float64)
TEXTS = ("2+2?", ("ab", "c\n"), ("d",))  # a prompt, and the first tokens of its completions
ADVANTAGES = torch.tensor([1.25, -0.75], dtype=torch.float64)
TOKENS, SEQUENCES = (
    torch.tensor(24),
    torch.tensor(8),
)  # of the minibatch, which has further completions
WHERE = MASK, IDS


def lines(args, share_T, streams: dict, fixed: dict, texts=None) -> list[dict]:
    """Return the lines of a trace with one group of two completions; `streams` and `fixed` are
    [T]."""
    prompt, *words = texts or TEXTS
    completions = []
    for n in range(2):
        own = IDS == n
        of_update = {
            name: trace_file.all_rounded(x_T[own])
            for name, x_T in (streams | dict(share=share_T)).items()
        }
        pieces = [*words[n], *"wxyz"][: int(own.sum())]
        completions.append(
            dict(
                reward=float(n == 0), advantage=ADVANTAGES[n].item(), finish_reason="stop",
                version=0, start=2, ids=[50, 51, *range(len(pieces))], tokens=["<p>", "?", *pieces],
                mask=MASK[own].int().tolist(),
                fixed={name: trace_file.all_rounded(x_T[own]) for name, x_T in fixed.items()},
                updates=[dict(update=0) | of_update],
            )
        )  # fmt: skip
    header = dict(
        schema=trace_file.SCHEMA, script=type(args).__module__, step=1, loss=[0.0], traced=[0.0],
        tokens=[int(TOKENS)], sequences=[int(SEQUENCES)], weights=[["0"]], flags=flags_of(args),
    )  # fmt: skip
    return [header, dict(group=3, chosen=["first", "best"], prompt=prompt, completions=completions)]


def write(folder: Path, args, traced: list[dict], steps: int = 2) -> Path:
    """Write a run with a trace at step 1."""
    folder.mkdir(parents=True)
    rows = [
        {"step": step, "reward": 0.5 + step / 10, "loss": 1 / step} for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "args.yaml").write_text(yaml.safe_dump(flags_of(args) | dict(output_dir=str(folder))))
    (folder / "timeline").mkdir()
    spans = [
        dict(what=what, began=1e9 + s, ended=1e9 + s + 0.9)
        for s in range(steps)
        for what in ("train", "step")
    ]
    (folder / "timeline" / "rank_0.jsonl").write_text(
        "".join(json.dumps(span) + "\n" for span in spans)
    )
    trace_file.write(folder / "trace" / f"step_{traced[0]['step']:06}.jsonl.gz", traced)
    return folder


FIXED = dict(rollout_logprobs=ROLLOUT, old_logprobs=OLD, ref_logprobs=REF, versions=IDS * 0)


def grpo_lines(**changed) -> tuple[grpo.Args, list[dict]]:
    texts = changed.pop("texts", None)
    args = grpo.Args(beta=0.05, entropy_coef=0.01, max_new_tokens=16, **changed)
    old_T = ROLLOUT if args.old_logprobs == "engine" else OLD
    share_T, logged = grpo.loss(
        NEW, old_T, ROLLOUT, REF, ENTROPY, ADVANTAGES[IDS], MASK, IDS, TOKENS, SEQUENCES, args,
        entropy_coef=args.entropy_coef,
    )  # fmt: skip
    streams = dict(logprobs=NEW, entropy=ENTROPY, logprobs_gradient=-share_T) | logged
    return args, lines(args, share_T, streams, FIXED, texts)


def gspo_lines(**changed) -> tuple[gspo.Args, list[dict]]:
    args = gspo.Args(beta=0.05, entropy_coef=0.01, max_new_tokens=16, **changed)
    share_T, logged = gspo.loss(
        NEW, OLD, ROLLOUT, REF, ENTROPY, ADVANTAGES[IDS], MASK, IDS, TOKENS, SEQUENCES, args
    )
    return token_case(args, share_T, logged)


def token_case(args, share_T, logged: dict, **fixed) -> tuple[object, list[dict]]:
    streams = dict(logprobs=NEW, entropy=ENTROPY) | logged
    return args, lines(args, share_T, streams, FIXED | fixed)


def dapo_case():
    args = dapo.Args(correction_mode="mask", correction_low=0.5, correction_high=1.5)
    old = OLD, ROLLOUT, None, ADVANTAGES[IDS], MASK, IDS, TOKENS, 0.0
    return token_case(args, *dapo.loss(NEW, *old, args))


def reinforce_case():
    args = reinforce.Args(preset="reinforce++_baseline", beta=0.03)
    A_T = torch.linspace(-1, 1, 7).double().round(decimals=3)
    shared = ENTROPY, A_T, MASK, IDS, TOKENS, SEQUENCES, args.beta
    share_T, logged = reinforce.loss(NEW, OLD, ROLLOUT, REF, *shared, args)
    return token_case(args, share_T, logged, advantages=A_T)


def ppo_case():
    args = ppo.Args(entropy_coef=0.01)
    A_T = torch.linspace(-1, 1, 7).double().round(decimals=3)
    c_T = importance_weights(OLD, ROLLOUT, *WHERE, args.correction_form)
    share_T, logged = ppo.loss(NEW, OLD, ENTROPY, A_T, c_T, MASK, TOKENS, torch.tensor(5), args)
    return token_case(args, share_T, logged, advantages=A_T, importance=c_T)


def row_case(args, fixed: dict, *rows: dict):
    """Return a trace whose losses are of completions, or of the pair if there is one row."""
    header, group = lines(args, torch.zeros(7), dict(logprobs=NEW), fixed)
    for completion, row in zip(group["completions"], (*rows, None), strict=False):
        update = completion["updates"][0]
        del update["share"]
        if row:
            update["row"] = {name: trace_file.rounded(float(x)) for name, x in row.items()}
    return args, [header, group]


def sums(x_T):
    return torch.zeros(2).double().index_add(0, IDS[MASK], x_T[MASK])


def rloo_case():
    args = rloo.Args()
    c_T = importance_weights(OLD, ROLLOUT, *WHERE, args.correction_form)
    share_N, logged = rloo.loss(
        sums(NEW), sums(OLD), c_T[torch.tensor([3, 6])], ADVANTAGES, SEQUENCES, args
    )
    rows = [
        {name: x_N[n] for name, x_N in (logged | dict(share=share_N)).items()} for n in range(2)
    ]
    return row_case(args, FIXED, *rows)


def dpo_case(*names: str, **changed):
    args = dpo.Args(loss=names, **changed)
    logps, refs, lengths = (
        sums(NEW).round(decimals=3),
        sums(REF).round(decimals=3),
        sums(torch.ones(7).double()),
    )
    pairs = Pairs(
        *(x_2[n : n + 1] for x_2 in (logps, refs, lengths) for n in range(2)),
        weights=torch.ones(1).double(),
    )
    referenced = names[0] not in dpo.REFERENCE_FREE
    per_token = rewards_per_token(names[0], args.length_normalize)
    chosen, rejected = implicit_rewards(
        pairs, per_token=per_token, referenced=referenced, beta=args.beta
    )
    loss_1, _ = dpo.loss(pairs, args)
    row = {
        "share": loss_1 / args.batch_size,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "logps/chosen": pairs.chosen_logps,
        "logps/rejected": pairs.rejected_logps,
    }
    return row_case(args, {}, row)


def kto_case(**changed):
    args = kto.Args(desirable_weight=1.5, **changed)
    weights = [0.5, 0.25] if args.wpo else [1, 1]
    ratio_N = torch.tensor([0.5, -0.25]).double()
    baseline = torch.tensor(0.125 if args.loss == "kto" else 0.0).double()
    loss_N = kto.loss(ratio_N, torch.tensor([True, False]), baseline, args)
    rows = [
        {
            "share": weights[n] * loss_N[n] / args.batch_size, "log_ratio": ratio_N[n],
            "rewards/accuracies": 1, "wpo/weight": weights[n],
        } | ({"kl": baseline} if args.loss == "kto" else {}) for n in range(2)
    ]  # fmt: skip
    return row_case(args, {}, *rows)


def rm_case():
    args = rm.Args(center_coefficient=0.01)
    chosen, rejected = torch.tensor([1.25]).double(), torch.tensor([0.5]).double()
    loss_1 = rm.loss(chosen, rejected, 0.0, args.center_coefficient)
    return row_case(
        args,
        {},
        {"share": loss_1 / args.batch_size, "rewards/chosen": chosen, "rewards/rejected": rejected},
    )


def likelihood_case(args):
    loss_T = sft.loss("dft", NEW) if isinstance(args, sft.Args) else -NEW
    return args, lines(args, loss_T * MASK / TOKENS, dict(logprobs=NEW), {})


def distill_case(**flags):
    args, zero = distill.Args(samples_per_prompt=2, reward="exact_match", **flags), torch.zeros(7)
    both = distill.Comparison(NEW, ENTROPY, zero, zero, REF, zero, zero, zero.bool())
    share_T, logged = distill.loss(both, OLD, ROLLOUT, ADVANTAGES[IDS], MASK, IDS, TOKENS, args)
    streams = dict(divergence=ENTROPY, teacher_logprobs=REF) | logged
    return token_case(args, share_T, streams)


CASES: dict[str, Callable] = {
    "clip": lambda: grpo_lines(),
    "dual clip": lambda: grpo_lines(dual_clip=1.1),
    "k1": lambda: grpo_lines(kl_estimator="k1", kl_clamp=0.2, correction="none"),
    "unbiased k2": lambda: grpo_lines(kl_estimator="k2", unbiased_kl=True),
    "filter": lambda: grpo_lines(correction_filter=(0.9, 1.02), correction_mode="mask"),
    "rejection": lambda: grpo_lines(
        correction="none", correction_reject="token_tv", correction_bound=0.1
    ),
    "off policy": lambda: grpo_lines(off_policy_threshold=0.05),
    "gspo": lambda: gspo_lines(reduction="sequence_sum"),
    "sequence_clip": lambda: gspo_lines(loss="sequence_clip", dual_clip=1.1),
    "gmpo": lambda: gspo_lines(loss="gmpo"),
    "topr": lambda: gspo_lines(loss="topr"),
    "vespo": lambda: gspo_lines(loss="vespo"),
    "dppo": lambda: grpo_lines(loss="dppo", old_logprobs="engine", correction="none"),
    "dppo kl": lambda: grpo_lines(loss="dppo", dppo_divergence="kl", dppo_bound=0.01),
    "cispo mask": lambda: grpo_lines(loss="cispo", cispo_mask=(0.3, 0.2), old_beta=0.2),
    "cispo": lambda: grpo_lines(loss="cispo", cispo_high=0.2, reduction="constant"),
    "reinforce loss": lambda: grpo_lines(loss="reinforce", reduction="sequence_sum"),
    "sapo": lambda: grpo_lines(loss="sapo"),
    "dapo": dapo_case,
    "reinforce": reinforce_case,
    "ppo": ppo_case,
    "rloo": rloo_case,
    "kto": kto_case,
    "rm": rm_case,
    "sft": lambda: likelihood_case(sft.Args(loss="dft")),
    "bok": lambda: likelihood_case(bok.Args()),
    "distill": lambda: distill_case(divergence="forward_kl"),
    "distill sampled": lambda: distill_case(estimator="sampled", reward_coef=1.0),
    "kto wpo": lambda: kto_case(wpo=True),
    "kto apo": lambda: kto_case(loss="apo_zero_unpaired"),
    "dpo sum": lambda: dpo_case("sigmoid", "nca_pair", loss_weights=(0.8, 0.2)),
    "dpo js": lambda: dpo_case("hinge", f_divergence="js"),
    "dpo forward_kl": lambda: dpo_case("sigmoid", f_divergence="forward_kl"),
    "ipo summed": lambda: dpo_case("ipo", length_normalize=False),
}
for name in sorted(set(dpo.preference.READS) - dpo.OVER_BATCH):
    smoothing = dict(label_smoothing=0.1) if name in ("robust", "exo_pair") else {}
    CASES[f"dpo {name}"] = partial(dpo_case, name, **smoothing)


# ---- the browser ----


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*module["CHROMIUM"]])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser) -> Iterator[Callable]:
    """`tab(url, **options)` opens a page. At the end it must have had no error and no request
    elsewhere."""
    opened, wrong = [], []

    def tab(url: str, **options):
        context = browser.new_context(**options)
        page = context.new_page()
        page.on(
            "console",
            lambda message: wrong.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        page.on(
            "request",
            lambda request: wrong.append(request.url) if not request.url.startswith(url) else None,
        )
        opened.append(context)
        page.goto(url)
        page.locator("[data-ready]").wait_for()
        return page

    yield tab
    for context in opened:
        context.close()
    assert wrong == []


def built(*folders: Path) -> str:
    """Write the page of runs and return its address."""
    out = folders[0] / "view.html"
    out.write_text(
        module["page"](module["collect"]([*folders], embed=True) | dict(live=0)), encoding="utf-8"
    )
    return out.as_uri()


@pytest.fixture
def run(tmp_path) -> Path:
    return write(tmp_path / "run", *grpo_lines())


# ---- numbers ----


@pytest.fixture(scope="module")
def audits(browser, tmp_path_factory) -> dict[str, list[dict]]:
    """Comparisons of recorded and computed shares, by case: all cases are runs of one page."""
    folder = tmp_path_factory.mktemp("cases")
    folders = [write(folder / name.replace(" ", "_"), *case()) for name, case in CASES.items()]
    page = browser.new_page()
    page.goto(built(*folders))
    page.locator("[data-ready]").wait_for()
    return {
        name: page.evaluate(f"setRun({i}).then(() => view.audit())") for i, name in enumerate(CASES)
    }


@pytest.mark.parametrize("name", CASES)
def test_formulas_reproduce_the_shares_of_the_scripts(audits, name):
    found = audits[name]
    expected = (
        [1, 1] if name.startswith(("rloo", "kto", "rm", "dpo", "ipo")) else [3, 3]
    )  # rows, or trained tokens
    assert [x["tokens"] for x in found] == expected
    assert max(x["relative"] for x in found) < 1e-6


def test_formula_is_shown_with_numbers_beside_the_recorded_share(run, tab):
    page = tab(built(run))
    page.locator("#rows .token").nth(1).click()
    text = page.locator("#formula").inner_text()
    assert "= −min(rho * A, clip(rho, 1 − clip_low, 1 + clip_high) * A)" in text
    assert "equal to the digits of the trace" in text and "3 of 3 shares are equal" in text
    assert "= 1 / 24" in text
    marked = page.locator("#formula .source").first.locator(".marked").all_inner_texts()
    assert marked[0].strip().startswith('case "clip":') and len(marked) == 7


def test_wrong_share_is_called_different(tmp_path, tab):
    args, (header, group) = grpo_lines()
    group["completions"][0]["updates"][0]["share"][0] *= 1.001
    page = tab(built(write(tmp_path / "run", args, [header, group])))
    page.locator("#rows .token").first.click()
    assert "different" in page.locator("#formula").inner_text()


def test_share_without_a_number_of_its_formula_is_not_compared(tmp_path, tab):
    args, (header, group) = grpo_lines()
    header["tokens"] = header["sequences"] = []
    page = tab(built(write(tmp_path / "run", args, [header, group])))
    page.locator("#rows .token").first.click()
    assert "the trace lacks a number of this formula" in page.locator("#formula").inner_text()


# ---- copies of scripts ----


def copied(folder: Path, args, traced: list[dict], script: str) -> Path:
    """Write the run of mine.py, a copy of a script in another folder."""
    header, *groups = traced
    run = write(folder / "run", args, [header | dict(script="mine"), *groups])
    copy = folder / "elsewhere" / "mine.py"
    copy.parent.mkdir()
    copy.write_text((ROOT / f"{script}.py").read_text().replace("def loss(", "def loss(  # mine\n"))
    (run / "args.yaml").write_text(f"# {copy}\n{(run / 'args.yaml').read_text()}")
    return run


@pytest.mark.parametrize(
    "name", ["clip", "sapo", "dapo", "ppo", "rloo", "kto", "rm", "bok", "distill", "dpo sum"]
)
def test_copy_has_the_formulas_of_its_origin(tmp_path, tab, name):
    args, traced = CASES[name]()
    script = type(args).__module__
    page = tab(built(copied(tmp_path, args, traced, script)))
    assert page.evaluate("view.audit().map((x) => [x.tokens, x.equal])") in (
        [[3, 3]] * 2,
        [[1, 1]] * 2,
    )
    page.locator("#rows .token").first.click()
    formula = page.locator("#formula").inner_text()
    origin = dict(bok="sft").get(script, script)  # with the same formula
    assert (
        f"The formulas are those of {origin}.py." in formula
        and "equal to the digits of the trace" in formula
    )
    shown = [text.rpartition("/")[2] for text in page.locator("#formula summary").all_inner_texts()]
    assert "mine.py, loss" in shown and ("preference.py, preference_loss" in shown) == (
        script == "dpo"
    )
    assert "def loss(  # mine" in page.locator("#formula").text_content()


@pytest.mark.parametrize(
    "change", [lambda x: x * 1.001, lambda x: 0.0], ids=["another loss", "no loss"]
)
def test_changed_copy_shows_the_recorded_share_and_its_source(tmp_path, tab, change):
    args, (header, group) = grpo_lines()
    for update in (
        update for completion in group["completions"] for update in completion["updates"]
    ):
        update["share"] = [change(x) for x in update["share"]]
    page = tab(built(copied(tmp_path, args, [header, group], "grpo")))
    page.locator("#rows .token").first.click()
    formula = page.locator("#formula").inner_text().replace("−", "-")
    assert f"recorded share {group['completions'][0]['updates'][0]['share'][0]:.7g}" in formula
    assert "no formulas" in formula and "adds nothing" not in formula
    assert "def loss(  # mine" in page.locator("#formula").text_content()
    page.locator("#rows .untrained").first.click()
    assert "adds nothing" in page.locator("#formula").inner_text()


def test_advantage_of_a_token_takes_the_place_of_that_of_its_completion(tmp_path, tab):
    args, A_T = grpo.Args(), torch.linspace(-1, 1, 7).double().round(decimals=3)
    old_T = ROLLOUT if args.old_logprobs == "engine" else OLD
    share_T, logged = grpo.loss(
        NEW, old_T, ROLLOUT, None, ENTROPY, A_T, MASK, IDS, TOKENS, SEQUENCES, args
    )
    page = tab(built(write(tmp_path / "run", *token_case(args, share_T, logged, advantages=A_T))))
    assert page.evaluate("view.audit().map((x) => [x.tokens, x.equal])") == [[3, 3]] * 2
    page.locator("#rows .token").nth(1).focus()
    assert f"advantage {A_T[1].item():.4g} ·" in page.locator("#status").inner_text().replace(
        "−", "-"
    )


# ---- text, keyboard, width ----


def test_hostile_text_stays_text(tmp_path, tab):
    args, traced = grpo_lines(texts=(HOSTILE, (HOSTILE, "b"), (HOSTILE,)))
    run = write(tmp_path / "run", args, traced)
    flags = yaml.safe_load((run / "args.yaml").read_text())
    (run / "args.yaml").write_text(yaml.safe_dump(flags | dict(model=HOSTILE)))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 1.0, HOSTILE: 1.0}) + "\n")
    page = tab(built(run))
    assert page.locator("#prompt").inner_text() == HOSTILE
    assert page.locator("#rows .token").first.inner_text() == HOSTILE
    page.locator("#rows .token").first.click()
    assert HOSTILE in page.locator("#formula h2").inner_text()
    page.click("#tab-data")
    page.evaluate("document.getElementById('chooser').open = true")
    assert HOSTILE in page.locator("#metrics").inner_text()
    assert page.locator("img").count() == 0


def test_policy_forbids_other_scripts_and_requests(run, browser):
    page = browser.new_page()
    page.goto(built(run))
    page.locator("[data-ready]").wait_for()
    found = page.evaluate("""async () => {
        const found = [];
        const both = new Promise((done) => addEventListener('securitypolicyviolation',
            ({ violatedDirective }) => found.push(violatedDirective) === 2 && done()));
        const script = document.createElement('script');
        document.body.append(Object.assign(script, { text: 'window.injected = 1' }));
        fetch('http://127.0.0.1:9/').catch(() => 0);
        await both;
        return [window.injected, ...found.sort()];
    }""")
    assert found == [None, "connect-src", "script-src-elem"]
    page.close()


def test_keyboard_moves_between_tokens_and_opens_them(run, tab):
    page = tab(built(run))
    status, current = page.locator("#status"), page.locator("[aria-current=true].token")
    page.locator("#rows .token").first.focus()
    assert status.inner_text().startswith('token 0 "ab" (id 0) · advantage 1.25 · ratio 1.649')
    page.keyboard.press("ArrowRight")
    assert status.inner_text().startswith('token 1 "c\\n" (id 1)')
    page.keyboard.press("ArrowRight")
    assert "not trained" in status.inner_text()
    page.keyboard.press("ArrowDown")
    assert status.inner_text().startswith('token 2 "x" (id 2) · advantage −0.75')
    page.keyboard.press("Home")
    assert current.inner_text() == "d"
    page.keyboard.press("Enter")
    assert page.locator("#formula").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#formula").is_visible() and current.evaluate(
        "x => x === document.activeElement"
    )


def test_groups_are_sorted_and_filtered(tmp_path, tab):
    args, (header, group) = grpo_lines()
    equal = json.loads(json.dumps(group)) | dict(group=0, prompt="1+1?", chosen=[])
    for completion in equal["completions"]:
        completion |= dict(reward=0.0, finish_reason="length")
    page = tab(built(write(tmp_path / "run", args, [header, equal, group])))
    prompts, rows = (
        sync_api.expect(page.locator(where)) for where in ("#list .text", "#rows .row")
    )
    prompts.to_have_text(["2+2?", "1+1?"])
    assert (
        "1 of 2 with reward ≥ 1 · mean 0.5 ± 0.5 first, best"
        in page.locator("#list .facts").first.inner_text()
    )
    page.select_option("#order", "position")
    prompts.to_have_text(["1+1?", "2+2?"])
    page.select_option("#finish", "length")
    prompts.to_have_text(["1+1?"])
    page.select_option("#finish", "")
    page.fill("#reward-low", "0.5")
    prompts.to_have_text(["2+2?"])
    rows.to_have_count(1)
    page.fill("#reward-low", "")
    page.fill("#text", "1+")
    prompts.to_have_text(["1+1?"])
    page.fill("#text", "absent")
    prompts.to_have_count(0)
    rows.to_have_count(0)


def test_arrow_keys_and_enter_choose_a_group(tmp_path, tab):
    args, (header, group) = grpo_lines()
    page = tab(
        built(write(tmp_path / "run", args, [header, group, group | dict(group=4, prompt="3+3?")]))
    )
    page.locator("#list .group").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("#prompt").inner_text() == "3+3?"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_page_does_not_scroll_sideways(tmp_path, run, tab, scheme):
    other = write(tmp_path / "other", *grpo_lines(loss="cispo"))
    page = tab(built(run, other), viewport=dict(width=360, height=700), color_scheme=scheme)
    page.evaluate("view.openLargest()")
    for name in ("trace", "data", "compare"):
        page.click(f"#tab-{name}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(25, 26, 28)") == (scheme == "dark")


def test_only_visible_rows_are_rendered(tmp_path, tab):
    args, (header, group) = grpo_lines()
    page = tab(
        built(
            write(
                tmp_path / "run",
                args,
                [header, group | dict(completions=group["completions"] * 1000)],
            )
        )
    )
    assert 2 < page.locator("#rows .row").count() < 100
    page.evaluate("document.getElementById('rows').scrollTo(0, 1e9)")
    page.get_by_text("1999 3 tokens, 3 trained").wait_for()
    assert page.locator("#rows .row").count() < 200


# ---- further pages ----


def test_data_page_shows_tokens_and_mask(run, tab):
    page = tab(built(run))
    page.click("#tab-data")
    assert page.locator("#data-note").inner_text() == "2 rows, 11 tokens, 6 trained"
    tokens = page.locator("#data-rows .row").first.locator(".token")
    assert [
        "untrained" in x for x in tokens.evaluate_all("all => all.map((x) => x.className)")
    ] == [True, True, False, False, True, False]


def test_compare_page_shows_differences(tmp_path, run, tab):
    args, (header, group) = grpo_lines(clip_high=5.0)
    second = group["completions"][1]
    second["ids"], second["tokens"] = [50, 51, 0, 9, 9], ["<p>", "?", "d", "other", "other"]
    other = write(tmp_path / "other", args, [header, group])
    (other / "gradients.json").write_text(
        json.dumps(dict(cosine={"layers.0": 0.99, "head": -0.5}, norm=[1.5, 2.5]))
    )
    page = tab(built(run, other))
    page.click("#tab-compare")
    sync_api.expect(page.locator("#compared")).to_contain_text(
        "2 completions of the same prompts; steps 1 and 1"
    )
    first = group["completions"][0]["updates"][0]["share"][0]
    mine = grpo_lines()[1][1]["completions"][0]["updates"][0]["share"][0]
    page.locator("#pairs .token").first.focus()
    assert f"difference of loss share {mine - first:.4g}" in page.locator(
        "#status"
    ).inner_text().replace("−", "-")
    sync_api.expect(page.locator("#pairs .differs")).to_have_text(["w", "x", "other", "other"])
    cells = page.locator("#metric-table td").all_inner_texts()
    assert cells == ["reward", "0.6", "0.6", "0", "loss", "1", "1", "0"]
    bars = page.locator("#gradients meter").evaluate_all("all => all.map((x) => x.value)")
    assert bars == [0.99, -0.5] and "norms 1.5 and 2.5" in page.locator("#gradients").inner_text()
    page.select_option("#difference", "gradient")
    assert page.locator("#compare-legend").inner_text().startswith("gradient: run − other")


def test_runs_that_differ_in_the_seed_are_a_mean_with_a_band(tmp_path, tab):
    args, traced = grpo_lines()
    folders = [write(tmp_path / f"seed{seed}", replace(args, seed=seed), traced) for seed in (0, 1)]
    data = module["collect"](folders, embed=False)
    (group,) = data["groups"]
    assert group["runs"] == [0, 1] and group["curves"]["reward"] == [
        [1, 2],
        [0.6, 0.7],
        [0.6, 0.7],
        [0.6, 0.7],
    ]
    page = tab(built(*folders))
    assert page.locator("#labels").inner_text().split() == ["seed0,", "seed1"]
    assert page.evaluate("shown.charts[0].series.length") == 4  # steps, mean, two edges of the band


def test_first_metrics_are_the_curves_of_the_script(run):
    data = module["collect"]([run], embed=False)
    assert data["main"] == ["reward"]
    ppo_curves, sft_curves, dapo_curves = (
        module["curves_of"](ROOT / f"{name}.py") for name in ("ppo", "sft", "dapo")
    )
    assert ppo_curves[-3:] == ["objective/kl", "value_loss", "explained_variance"]
    assert sft_curves == [*sft.CURVES] and dapo_curves[-1].startswith("dynamic")


# ---- a live run, and the command ----


def test_serve_follows_a_new_step(run, tab, monkeypatch):
    monkeypatch.setitem(module["serve"].__globals__, "POLL_SECONDS", 0.02)
    servers, started = [], threading.Event()
    ready = lambda server: (servers.append(server), started.set())  # noqa: E731
    thread = threading.Thread(target=module["serve"], args=([run], 0, ready), daemon=True)
    thread.start()
    assert started.wait(10)
    (server,) = servers
    assert server.server_address[0] == "127.0.0.1"
    try:
        page = tab(f"http://localhost:{server.server_port}/")
        assert page.locator("#where").inner_text() == "step 2, trace of 1"
        _, (header, group) = grpo_lines(texts=("5+5?", ("ab", "c\n"), ("d",)))
        trace_file.write(run / "trace" / "step_000003.jsonl.gz", [header | dict(step=3), group])
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "reward": 0.9, "loss": 0.1}\n{"step": 4, "rew')
        page.get_by_text("step 3, trace of 3").wait_for(timeout=1000 * PATIENCE)
        sync_api.expect(page.locator("#prompt")).to_have_text("5+5?")
        page.context.close()
    finally:
        server.shutdown()
        thread.join(10)


@pytest.fixture
def command(monkeypatch, capsys) -> Callable:
    """`command(*options)` returns stdout and stderr of the tool, which must end with `code`."""

    def command(*options: object, code: int = 0) -> tuple[str, str]:
        return call_main(module["main"], [VIEW, *options], code, monkeypatch, capsys)

    return command


def test_command_writes_a_page_and_a_picture(run, tmp_path, command):
    out, _ = command(run)
    assert out.startswith(f"{run}/view.html: 0.") and out.endswith(" MB\n") and out.count("\n") == 1
    further = "--out", tmp_path / "x.html", "--screenshot", tmp_path / "x.png"
    subprocess.run([sys.executable, VIEW, run, *further], check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "x.png").stat().st_size > 10_000


def damaged(run: Path, what: str) -> None:
    path = run / "trace" / "step_000001.jsonl.gz"
    content = path.read_bytes()
    match what:
        case "cut":
            path.write_bytes(content[:-20])
        case "text":
            path.write_bytes(b"no gzip")
        case "empty":
            path.write_bytes(gzip.compress(b""))
        case "json":
            path.write_bytes(gzip.compress(gzip.decompress(content)[:-30]))
        case "schema":
            path.write_bytes(
                gzip.compress(gzip.decompress(content).replace(b'"schema": 1', b'"schema": 99'))
            )
        case "metrics":
            (run / "metrics.jsonl").unlink()
        case "steps":
            (run / "metrics.jsonl").write_text("")
        case "timeline":
            (run / "timeline" / "rank_0.jsonl").write_text("{}\n")
        case "gradients":
            (run / "gradients.json").write_text("[]")
        case "script":
            (run / "grpo.py").write_text("def loss(:")
            flags = (run / "args.yaml").read_text()
            (run / "args.yaml").write_text(f"# {run / 'grpo.py'}\n{flags}")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("cut", "{run}/trace/step_000001.jsonl.gz: damaged; delete it"),
        ("text", "{run}/trace/step_000001.jsonl.gz: damaged; delete it"),
        ("empty", "{run}/trace/step_000001.jsonl.gz: damaged; delete it"),
        ("json", "{run}/trace/step_000001.jsonl.gz: damaged; delete it"),
        (
            "schema",
            "{run}/trace/step_000001.jsonl.gz: schema 99, expected 1; read it with its own version",
        ),
        (
            "metrics",
            "{run}/metrics.jsonl: No such file or directory; name the output folder of a run",
        ),
        ("steps", "{run}/metrics.jsonl: no finished step; wait for the first one"),
        ("timeline", "{run}/timeline/rank_0.jsonl: damaged; delete it"),
        ("gradients", "{run}/gradients.json: damaged; delete it"),
        ("script", "{run}/grpo.py, line 1: invalid syntax; mend it, or view the run without it"),
    ],
)
def test_bad_input_is_one_line(run, command, what, words):
    damaged(run, what)
    _, shown = command(run, code=2)
    assert shown == f"error: {words.format(run=run)}\n"


def test_bad_commands_are_one_line(run, command):
    for options, words in (
        ((run, run), f"{run}: the folder is given twice"),
        (
            (run / "absent",),
            "absent/metrics.jsonl: No such file or directory; name the output folder of a run",
        ),
        ((run, "--out", "/absent/x.html"), "[Errno 2] No such file or directory: '/absent/x.html'"),
        ((run, "--serve", "x"), "argument --serve: invalid int value: 'x'"),
        ((run, "--serve", "-1"), "--serve -1: must be between 0 and 65535"),
    ):
        _, shown = command(*options, code=2)
        assert words in shown and shown.count("\n") == 1
