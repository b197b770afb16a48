"""eval.py: results are the same on one rank, on two, and after a kill; files of completions, other
models and judges; the checkpoints of a run."""

import importlib
import itertools
import json
import math
import shutil

import pytest
import torch
from helpers import metrics, read_rows, write_rows
from in_process import talkative
from processes import run

from common.config.groups import TrainArgs
from common.evaluate import checkpoint_curve, completions_file
from common.evaluate.completions_file import read_completions
from common.model.policy import load_policy, load_scalar_model
from common.model.scoring import score
from common.model.tiny import tiny_model
from common.packs.sample import Completion, Sample
from common.parallel import process
from common.rewards.total import Rewards
from common.rollout import transformers_engine
from common.rollout.engine import Engine
from common.rollout.prompts import Prompts
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import Checkpointer, export_hf
from common.train.optim import adamw

evaluation = importlib.import_module("eval")  # `import eval` would hide the builtin


# ---- runs ----


@pytest.fixture(scope="module")
def models(small, device, tmp_path_factory):
    """A language model that answers with digits (untrained, made less random), and a reward
    model."""
    folder = tmp_path_factory.mktemp("models")
    path, args = str(small[1]), TrainArgs(dtype="float32")
    tokenizer, policy = load_tokenizer(path), load_policy(path, args, device)
    with torch.no_grad():
        dict(policy.named_parameters())["hf.model.embed_tokens.weight"].to_local().mul_(2.0)
    export_hf(policy, tokenizer, folder / "policy")
    export_hf(load_scalar_model(path, args, device), tokenizer, folder / "rm")
    return folder


@pytest.fixture(scope="module")
def flags(models):
    rows = [dict(prompt=f"{i}+1=", answer=str(i + 1), domain="ab"[i % 2]) for i in range(11)]
    write_rows(models / "rows.jsonl", rows)
    (models / "reward.py").write_text(
        "def some(completion, row):\n"
        "    return float(sum(i * ord(c) for i, c in enumerate(completion, 1)) % 3 == 0)\n"
    )
    return (
        "--model", models / "policy", "--dataset", models / "rows.jsonl",
        "--reward", f"{models / 'reward.py'}:some", "--samples_per_prompt", 4,
        "--max_new_tokens", 10, "--prompts_per_step", 4, "--engine", "transformers",
        "--reward_workers", 1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def one_rank(flags, main, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_rank")
    main("eval", *flags, "--output_dir", folder)
    return folder


def results(folder) -> dict:
    return json.loads((folder / "results.json").read_text())


def completions(folder, name="completions.jsonl") -> list[dict]:
    return read_rows(folder / name)


@pytest.mark.parametrize(("cut", "lines"), [(0.69, 1), (0.05, 0)])
def test_truncated_completions_are_told(cut, lines):
    """Truncated completions count as wrong. Without a line about it, a newcomer took them for what
    the model did not know."""
    overall = dict(failed=0, unscored=0, truncated=dict(mean=cut))
    said = evaluation.left_out(dict(overall=overall), [])
    assert len(said) == lines and all(
        line.startswith("69% of the completions were truncated") for line in said
    )


@pytest.mark.slow
def test_results_equal_those_of_the_written_completions(one_rank):
    lines, found = completions(one_rank), results(one_rank)
    assert [line["source"] for line in lines] == [f"rows.jsonl:{i}" for i in range(1, 12)]
    assert all([c["greedy"] for c in line["completions"]] == [True] + [False] * 4 for line in lines)
    scores = [[c["score"] for c in line["completions"]] for line in lines]
    assert all(s in (0.0, 1.0) for group in scores for s in group)
    assert found["overall"]["solved"]["mean"] == pytest.approx(sum(s[0] for s in scores) / 11)
    for k in (1, 2, 3, 4):
        subsets = [
            any(subset) for group in scores for subset in itertools.combinations(group[1:], k)
        ]
        assert found["overall"]["pass_at_k"][str(k)]["mean"] == pytest.approx(
            sum(subsets) / len(subsets)
        )
    means = [found["overall"]["pass_at_k"][str(k)]["mean"] for k in (1, 2, 3, 4)]
    assert means == sorted(means) and 0.1 < means[0] < 0.5 < means[3]
    assert found["overall"]["majority_at_k"]["1"]["mean"] == pytest.approx(means[0], abs=0.08)
    lengths = [sum(c["sampled"]) for line in lines for c in line["completions"]]
    assert found["overall"]["mean_length"]["mean"] == pytest.approx(sum(lengths) / 55)
    assert found["overall"]["truncated"]["mean"] == pytest.approx(
        sum(c["finish_reason"] == "length" for line in lines for c in line["completions"]) / 55
    )
    assert {name: m["prompts"] for name, m in found["domains"].items()} == dict(a=6, b=5)
    parts = [found["domains"][name]["solved"]["mean"] * n for name, n in (("a", 6), ("b", 5))]
    assert sum(parts) / 11 == pytest.approx(found["overall"]["solved"]["mean"])


@pytest.mark.slow
def test_results_do_not_depend_on_ranks_or_resume(one_rank, flags, main, tmp_path, capsys):
    """The run that is resumed was killed, and its file ends in half a line."""
    whole = (one_rank / "completions.jsonl").read_text()
    (tmp_path / "completions.jsonl").write_text(whole[: whole.index("\n") + 50])
    (tmp_path / "args.yaml").write_text(
        (one_rank / "args.yaml").read_text().replace(str(one_rank), str(tmp_path))
    )
    done = run(2, "eval.py", *flags, "--output_dir", tmp_path, "--resume", "must")
    assert "5 of 11 prompts sampled" in done.stdout and "11 of 11" in done.stdout
    assert (tmp_path / "completions.jsonl").read_text() == whole and results(tmp_path) == results(
        one_rank
    )
    main("eval", *flags, "--output_dir", tmp_path)
    said = capsys.readouterr().out
    assert "sampled" not in said and "pass@4" in said and results(tmp_path) == results(one_rank)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_greedy_completions_alone(ranks, one_rank, flags, main, tmp_path):
    """There are three prompts, so one of four ranks has none."""
    flags = (*flags, "--samples_per_prompt", 0, "--eval_size", 3, "--output_dir", tmp_path)
    if ranks == 1:
        main("eval", *flags)
    else:
        run(ranks, "eval.py", *flags)
    expected = [line | dict(completions=line["completions"][:1]) for line in completions(one_rank)]
    assert completions(tmp_path) == expected[:3]
    found = results(tmp_path)["overall"]
    solved = sum(line["completions"][0]["score"] for line in expected[:3]) / 3
    assert found["solved"]["mean"] == pytest.approx(solved) and not found["pass_at_k"]


@pytest.mark.slow
def test_vllm_gives_equal_greedy_completions_and_judges(
    one_rank, flags, models, device, main, tmp_path
):
    """The run is compared to its own file, so every pair is a tie."""
    flags = (*flags, "--engine", "vllm", "--output_dir", tmp_path)
    run(1, "eval.py", *flags)
    judges = ("--reward_model", models / "rm", "--perplexity_model", models / "policy")
    main("eval", *flags, *judges, "--against", tmp_path / "completions.jsonl")
    for one, other in zip(completions(one_rank), completions(tmp_path), strict=True):
        assert one["completions"][0] == other["completions"][0]
    ours, found = completions(tmp_path), results(tmp_path)
    assert found["win_rate"] == dict(mean=0.5, low=0.5, high=0.5)
    tokenizer, args = load_tokenizer(models / "policy"), TrainArgs(dtype="float32")
    reward_model = load_scalar_model(str(models / "rm"), args, device, trainable=False)
    samples = []
    for i, line in enumerate(ours):
        prompt = tokenizer(f"{i}+1=")["input_ids"]
        for ids in (completion["ids"] for completion in line["completions"]):
            samples.append(Sample(prompt + ids, [False] * len(prompt) + [True] * len(ids)))
    mean = sum(score(reward_model, [[sample.ids] for sample in samples], 1000)) / 55
    assert found["reward_model"] == found["reward_model_against"]
    assert found["reward_model"]["mean"] == pytest.approx(mean, rel=1e-4)
    policy = load_policy(str(models / "policy"), args, device, trainable=False)
    likely = evaluation.log_likelihoods(policy, [samples], 1000)
    nats, tokens = -sum(x for x, _ in likely), sum(n for _, n in likely)
    assert found["perplexity"]["mean"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)


@pytest.mark.slow
def test_file_of_completions_gives_the_results_of_its_run(one_rank, flags, main, tmp_path):
    """The file of a run gives all results of the run again. A file of texts gives all but the
    statistics of sampling."""
    lines = completions(one_rank)
    texts = [dict(completion=line["completions"][0]["text"]) for line in lines]
    write_rows(tmp_path / "texts.jsonl", texts)
    greedy = [line | dict(completions=line["completions"][:1]) for line in lines]
    write_rows(tmp_path / "greedy.jsonl", greedy)
    own = ("--completions", one_rank / "completions.jsonl", "--output_dir", tmp_path / "own")
    main("eval", *flags, *own)
    assert results(tmp_path / "own") == results(one_rank)
    main(
        "eval", *flags, "--completions", tmp_path / "texts.jsonl",
        "--against", tmp_path / "greedy.jsonl", "--output_dir", tmp_path / "texts",
    )  # fmt: skip
    found = results(tmp_path / "texts")
    solved = results(one_rank)["overall"]["solved"]["mean"]
    assert found["overall"]["pass_at_k"]["1"]["mean"] == solved
    assert found["overall"]["solved"] == {} and found["win_rate"]["mean"] == 0.5


RAISES = """
def f(completion, row):
    if completion == "raise": raise KeyError("oops")
    return None if completion == "none" else float(completion == "1")
"""


@pytest.mark.parametrize(("odd", "counts", "solved", "line"), [
    ("raise", (1, 0), 0.8, "1 of 10 completions have a reward that failed and count as not solved; "
     "the first: f on rows.jsonl:10: KeyError: 'oops' (line 3)"),
    ("none", (0, 1), 8 / 9, "1 of 10 completions have no reward (None) and are in no fraction"),
])  # fmt: skip
def test_completion_without_a_reward_is_counted(odd, counts, solved, line, main, tmp_path, capsys):
    """It is counted in its domain too, and beside the win rate."""
    (tmp_path / "r.py").write_text(RAISES)
    texts = ["1"] * 8 + ["0", odd]
    rows = [dict(prompt="?", domain="ab"[i % 2]) for i in range(10)] + [dict(prompt="1+" * 3000)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    file = write_rows(tmp_path / "c.jsonl", [dict(completion=text) for text in texts])
    main(
        "eval", "--dataset", data, "--completions", file, "--reward", f"{tmp_path}/r.py:f",
        "--overlong", "drop", "--prompt_format", "plain", "--against", file,
        "--output_dir", tmp_path / "out",
    )  # fmt: skip
    said, found = capsys.readouterr().out, results(tmp_path / "out")
    assert line in said and "1 of 10 pairs are not compared: one has no reward" in said
    assert "10 prompts (1 too long)" in " ".join(said.split())
    overall = found["overall"]
    assert overall["pass_at_k"]["1"]["mean"] == pytest.approx(solved)
    assert (overall["failed"], overall["unscored"]) == counts
    of_domains = [
        (found["domains"][name]["failed"], found["domains"][name]["unscored"]) for name in "ab"
    ]
    assert of_domains == [(0, 0), counts]
    assert (found["too_long"], found["not_compared"]) == (1, 1)


@pytest.mark.parametrize(("thoughts", "majority"), [("cut", 1), ("keep", 0)])
def test_thoughts_do_not_vote(thoughts, majority, device):
    texts = [r"<think>\boxed{7}"] * 3 + [r"<think>\boxed{7}</think>\boxed{18}"]
    row = dict(answer="18", _source="rows:1")
    group = [
        Completion([1, 2], [False, True], 1, row, text=text, finish_reason="stop") for text in texts
    ]
    args = evaluation.Args(reward="boxed", thoughts=thoughts)
    rewards = Rewards(args, [row], load_tokenizer(tiny_model()), device)
    lines = completions_file.make_lines([group], rewards, greedy=False)
    assert evaluation.measure(args, lines)["majority_at_k"][4]["mean"] == majority


# ---- all checkpoints of a run ----


@pytest.fixture(scope="module")
def checkpoints(models, device):
    """Return a run's folder with the checkpoints of two steps."""
    (models / "run").mkdir()
    args = TrainArgs(output_dir=str(models / "run"), dtype="float32", keep_last=2)
    policy = load_policy(str(models / "policy"), args, device)
    saves = Checkpointer(args, policy, adamw(policy, args), load_tokenizer(tiny_model()))
    weight = dict(policy.named_parameters())["hf.model.embed_tokens.weight"].to_local()
    for step in (10, 20):
        with torch.no_grad():
            weight.mul_(1 + step / 100)
        saves.save(step)
    (models / "run/checkpoints/step_000030.tmp").mkdir()  # an unfinished save
    return models / "run/checkpoints"


@pytest.mark.slow
def test_stop_within_a_batch_leaves_it_to_the_next_start(
    one_rank, flags, main, tmp_path, monkeypatch
):
    """A batch takes a round for its greedy completions and four for the sampled ones. The stop
    comes in the second batch."""
    rounds, step = [], Engine.step

    def counted(engine, meter):
        step(engine, meter)
        rounds.append(1)
        process.stop_signalled |= len(rounds) == 5 + 2

    with monkeypatch.context() as patch:
        patch.setattr(transformers_engine, "BATCH", 4)
        patch.setattr(process, "stop_signalled", False)
        patch.setattr(Engine, "step", counted)
        main("eval", *flags, "--output_dir", tmp_path)
    assert len(completions(tmp_path)) == 4 and len(rounds) == 5 + 2
    main("eval", *flags, "--output_dir", tmp_path)
    assert completions(tmp_path) == completions(one_rank)


@pytest.mark.slow
def test_all_checkpoints_have_the_results_of_separate_evaluations(
    checkpoints, flags, main, tmp_path, monkeypatch, capsys
):
    flags, started, sampled = flags[2:], [], []
    file, curve, alone = evaluation.completions_file, tmp_path / "curve", tmp_path / "alone"
    make_engine, make_lines = evaluation.make_engine, file.make_lines

    def count_engines(*given, **named):
        started.append(given[0])
        return make_engine(*given, **named)

    def stop_at_the_fifth(*given, **named):
        sampled.append(given)
        process.stop_signalled = len(sampled) == 5
        return make_lines(*given, **named)

    monkeypatch.setattr(process, "stop_signalled", False)
    monkeypatch.setattr(evaluation, "make_engine", count_engines)
    monkeypatch.setattr(file, "make_lines", stop_at_the_fifth)
    main("eval", *flags, "--model", checkpoints, "--output_dir", curve)  # stops at the second one
    process.stop_signalled = False
    assert "told to stop" in capsys.readouterr().out
    assert [line["step"] for line in metrics(curve)] == [10]
    assert len(completions(curve / "step_000020")) == 8
    main("eval", *flags, "--model", checkpoints, "--output_dir", curve)
    assert len(sampled) == 6 and len(started) == 2  # three batches for each checkpoint
    assert [line["step"] for line in metrics(curve)] == [10, 20]
    main("eval", *flags, "--model", checkpoints / "step_000020", "--output_dir", alone)
    assert completions(alone) == completions(curve / "step_000020")
    assert results(alone) == results(curve / "step_000020")
    assert completions(alone) != completions(curve / "step_000010")
    found, line = results(alone)["overall"], metrics(curve)[1]
    pass_at_4 = found["pass_at_k"]["4"]["mean"]
    assert (line["solved"], line["pass_at_4"]) == (found["solved"]["mean"], pass_at_4)

    # A checkpoint that its run, which continues, deleted: the known results remain.
    shutil.rmtree(checkpoints / "step_000010")
    main("eval", *flags, "--model", checkpoints, "--output_dir", curve)
    assert len(sampled) == 9 and [line["step"] for line in metrics(curve)] == [10, 20]


def test_folder_without_checkpoints_is_refused(main, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    flags = ("--model", folder, "--output_dir", tmp_path / "out")
    with pytest.raises(ValueError, match=f"^--model {folder}: no checkpoints in this folder$"):
        main("eval", *flags)
    (folder / "step_000001").mkdir()
    with pytest.raises(ValueError, match="--completions c.jsonl are of one model"):
        main("eval", *flags, "--completions", "c.jsonl")


# ---- bad input ----


GOOD = '{"completion": "2"}\n'


@pytest.mark.slow
@pytest.mark.parametrize(("text", "words"), [
    (GOOD * 10, "10 lines for 11 rows of data"),
    (GOOD * 10 + "{\n", "line 11: Invalid JSON"),
    (GOOD * 10 + '{"completions": ["1", "2"]}\n', "line 11: another number of completions"),
    (GOOD * 10 + '{"text": "1"}\n', "line 11: completions: Field required"),
    (GOOD * 10 + '{"completion": {"text": "ab", "sampled": [1]}}\n', "line 11: .* the same length"),
    (
        GOOD * 10 + '{"completion": {"text": "a", "ids": [99999]}}\n',
        "line 11: completion: `ids` must be below",
    ),
    (GOOD * 10 + '{"completion": "\\ud800"}\n', "line 11: Invalid JSON"),
    (
        GOOD * 10 + '{"source": "rows.jsonl:7", "completion": "1"}\n',
        "line 11: `source` is rows.jsonl:7, but",
    ),
    (None, "No such file"),
])  # fmt: skip
def test_bad_files_of_completions_are_refused(text, words, device, tmp_path):
    if text is not None:
        (tmp_path / "c.jsonl").write_text(text)
    prompts = Prompts([[7]] * 11, [dict(_source=f"rows.jsonl:{i}") for i in range(1, 12)])
    with pytest.raises(ValueError, match=words) as error:
        read_completions(
            "--completions", tmp_path / "c.jsonl", prompts, load_tokenizer(tiny_model())
        )
    assert str(error.value).startswith(f"--completions {tmp_path / 'c.jsonl'}") and "\n" not in str(
        error.value
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (("--against", "{}/absent"), "No such file"),
        (("--against", "{}/c.jsonl"), "has 1 completions of a prompt, there are 5 here"),
        (("--reward_model", "{}/absent"), "--reward_model"),
        (("--perplexity_model", "{}/absent"), "--perplexity_model"),
    ],
)  # fmt: skip
def test_additional_inputs_are_checked_before_sampling(extra, words, flags, main, tmp_path):
    """After the error the flag can be corrected, and the folder still belongs to the run."""
    (tmp_path / "c.jsonl").write_text(GOOD * 11)
    extra = [part.format(tmp_path) for part in extra]
    with pytest.raises((ValueError, OSError), match=words):
        main("eval", *flags, *extra, "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out/completions.jsonl").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"overall": {}}'])
def test_broken_results_of_a_checkpoint_are_named(text, tmp_path):
    file = tmp_path / "step_000003" / "results.json"
    file.parent.mkdir()
    file.write_text(text)
    words = f"^{file}: broken; delete it, and the same command computes it anew: "
    with pytest.raises(ValueError, match=words):
        checkpoint_curve.draw(tmp_path)


SILENT = """
class Silent:
    def reset(self, example): return [dict(role="user", content=example["prompt"])]
    def step(self, completion): return [], 0.0, True
"""


@pytest.mark.slow
def test_stored_episodes_give_the_same_results(small, main, tmp_path):
    """The file has the environment's rewards. Compared to the run itself, every pair is a tie."""
    model = talkative(tmp_path / "model", small[1])
    (tmp_path / "silent.py").write_text(SILENT)
    flags = (
        "--model", model, "--environment", f"{tmp_path}/silent.py:Silent",
        "--eval_size", 5, "--reward", "environment", "format", "--max_turns", 3,
        "--max_new_tokens", 60, "--engine", "transformers",
    )  # fmt: skip
    main("eval", *flags, "--output_dir", tmp_path / "one")
    file = tmp_path / "one/completions.jsonl"
    lines = completions(tmp_path / "one")
    for i, line in enumerate(lines):  # the environment rewards nothing
        for c in line["completions"]:
            c["turn_rewards"] = [[c["turn_rewards"][0][0] if c["turn_rewards"] else 0, i % 2 + 0.5]]
    write_rows(file, lines)
    main("eval", *flags, "--completions", file, "--against", file, "--output_dir", tmp_path / "two")
    found = results(tmp_path / "two")
    assert found["win_rate"]["mean"] == 0.5 and found["overall"]["rewards"]["environment"][
        "mean"
    ] == pytest.approx(0.9)
    (tmp_path / "texts.jsonl").write_text(GOOD * 5)
    extra = ("--completions", tmp_path / "texts.jsonl", "--output_dir", tmp_path / "three")
    with pytest.raises(ValueError, match="line 1: completion: turn_rewards is missing"):
        main("eval", *flags, *extra)
