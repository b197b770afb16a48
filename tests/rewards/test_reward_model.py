"""Reward models: their scores are those of transformers on the conversation in the model's chat
template."""

import json
from functools import cache

import pytest
import torch
from helpers import write_rows
from in_process import Args
from model.checkpoints import sampled, save_classifier
from processes import run

from common.metrics.meter import Meter
from common.model.hub import resolve_model
from common.model.policy import load_scalar_model
from common.parallel.distributed import RunError
from common.rewards.total import Rewards
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import export_hf


@cache
def classifier(folder):
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def by_transformers(folder, ids: list[int]) -> float:
    return float(classifier(folder)(input_ids=torch.tensor([ids])).logits)


def exported(path: str, folder, device, tokenizer=None):
    """Return a model as rm.py exports it."""
    folder.parent.mkdir(exist_ok=True)
    model = load_scalar_model(path, Args(), device)
    export_hf(model, tokenizer or load_tokenizer(path), folder)
    return folder


@pytest.fixture
def asked(device):
    """Return the policy's tokenizer, rows of messages and of a question, and two completions of
    each."""
    tokenizer = load_tokenizer(resolve_model("tiny"))
    rows = [
        dict(prompt=[dict(role="user", content="What is in the bath?")], _source="a:1"),
        dict(prompt=[dict(role="user", content=text) for text in ("Hi", "Then?")], _source="a:2"),
    ]
    texts = (("thin things", "an ant"), ("", "nothing, and then a long answer"))
    groups = []
    for row, of_row in zip(rows, texts, strict=True):
        named = dict(tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.apply_chat_template(row["prompt"], **named)
        groups.append([sampled(tokenizer, row, prompt, text) for text in of_row])
    return tokenizer, rows, groups


@pytest.mark.slow
def test_model_scores_the_conversation_in_its_chat_template(asked, device, tmp_path):
    tokenizer, rows, groups = asked
    other = save_classifier(tmp_path / "other" / "hf")
    here = save_classifier(tmp_path / "start")
    trained = exported(str(here), tmp_path / "trained" / "hf", device)
    ours = exported(resolve_model("tiny"), tmp_path / "ours" / "hf", device)
    before = [list(sample.ids) for group in groups for sample in group]
    names = tuple(f"model:{folder}" for folder in (other, trained, ours))
    found = {}
    for pack_tokens in (4096, 150):
        args = Args(reward=names, pack_tokens=pack_tokens, max_new_tokens=64, dtype="float32")
        found[pack_tokens] = Rewards(args, rows, tokenizer, device).wait(groups, Meter())[1]
    parts = found[150]
    assert list(parts) == ["model", "model2", "model3"]
    for name, part_PG in parts.items():
        torch.testing.assert_close(part_PG, found[4096][name], atol=1e-5, rtol=1e-5)
    assert before == [sample.ids for group in groups for sample in group]
    theirs = load_tokenizer(str(other))
    for i, group in enumerate(groups):
        for j, sample in enumerate(group):
            messages = [*sample.row["prompt"], dict(role="assistant", content=sample.text)]
            whole = theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
            assert theirs.decode(whole).endswith("<|im_end|>\n")
            # a model of rm.py gets the same ids as in its training
            for name, folder, ids in (
                ("model", other, whole), ("model2", trained, whole[:-1]),
                ("model3", ours, sample.ids),
            ):  # fmt: skip
                assert parts[name][i, j] == pytest.approx(by_transformers(folder, ids), abs=1e-4)


@pytest.mark.slow
def test_completion_that_ends_at_a_stop_string_is_scored_without_it_and_with_an_eos(
    asked, device, tmp_path
):
    tokenizer, rows, groups = asked
    ours = exported(resolve_model("tiny"), tmp_path / "ours" / "hf", device)
    whole = [list(sample.ids) for group in groups for sample in group]
    end = tokenizer.convert_tokens_to_ids("<|end_of_turn|>")
    for group in groups:
        del group[0].ids[-1]
        group[0].ids += tokenizer("##")["input_ids"]
    args = Args(reward=(f"model:{ours}",), max_new_tokens=64, dtype="float32", stop=("##",))
    (part_PG,) = Rewards(args, rows, tokenizer, device).wait(groups, Meter())[1].values()
    for i, ids in enumerate(whole):
        ids[-1] = ids[-1] if i % 2 else end  # i % 2: ended with an EOS
        assert part_PG[i // 2, i % 2] == pytest.approx(by_transformers(ours, ids), abs=1e-4)


GROUP = """
def f(completions, row, ids):
    rare = {"long": 1.0, "rare": 2.0}
    return [(float(len(i)), rare if "long" in c else {}) for c, i in zip(completions, ids)]
"""


@pytest.mark.slow
def test_scores_do_not_depend_on_ranks(asked, main, device, tmp_path):
    """Rewards are models and a group function; only one rank has the function's metrics."""
    tokenizer, rows, groups = asked
    other = save_classifier(tmp_path / "other")
    ours = exported(resolve_model("tiny"), tmp_path / "ours", device)
    for name, lines in (
        ("rows", [dict(prompt=row["prompt"], answer="") for row in rows]),
        ("texts", [dict(completions=[sample.text for sample in group]) for group in groups]),
    ):
        write_rows(tmp_path / f"{name}.jsonl", lines)
    (tmp_path / "mine.py").write_text(GROUP)
    flags = (
        "--dataset", tmp_path / "rows.jsonl", "--completions", tmp_path / "texts.jsonl",
        "--reward", f"{tmp_path}/mine.py:f", f"model:{other}", f"model:{ours}",
        "--reward_model", other,
    )  # fmt: skip
    main("eval", *flags, "--output_dir", tmp_path / "1")
    run(2, "eval.py", *flags, "--output_dir", tmp_path / "2")
    one, two = (json.loads((tmp_path / ranks / "results.json").read_text()) for ranks in "12")
    assert list(one["overall"]["rewards"]) == ["f", "model", "model2", "f/long", "f/rare"]
    assert one["overall"]["rewards"]["f/rare"]["mean"] == 2
    assert one["reward_model"] == one["overall"]["rewards"]["model"]
    for name, found in one["overall"]["rewards"].items():
        assert two["overall"]["rewards"][name] == pytest.approx(found, rel=1e-5)


def test_plain_prompt_is_text_and_truncated_completion_has_no_eos(device, tmp_path):
    tokenizer = load_tokenizer(resolve_model("tiny"))
    other = save_classifier(tmp_path / "other", template=None)
    row = dict(question="What then?", _source="a:1")
    group = [sampled(tokenizer, row, "What then?\n", "nothing", how) for how in ("stop", "length")]
    args = Args(reward=(f"model:{other}",), prompt_format="plain", dtype="float32")
    _, parts, _ = Rewards(args, [row], tokenizer, device).wait([group], Meter())
    theirs = load_tokenizer(str(other))
    ids = theirs("What then?\nnothing")["input_ids"]
    expected = [by_transformers(other, ids + [theirs.eos_token_id]), by_transformers(other, ids)]
    assert parts["model"][0].tolist() == pytest.approx(expected, abs=1e-4)
    assert expected[0] != expected[1]


def test_unreadable_sequence_has_no_reward(asked, device, tmp_path):
    """The sequence exceeds the model's context, in its ids or in the policy's, exceeds
    --pack_tokens, or is refused by the template."""
    tokenizer, rows, groups = asked
    other = save_classifier(tmp_path / "other", context=50)
    args = Args(reward=(f"model:{other}",), max_reward_errors=0.3, dtype="float32")
    rewards, meter = Rewards(args, rows, tokenizer, device), Meter()
    total, _, _ = rewards.wait(groups, meter)
    assert total.isnan().tolist() == [[False, False], [False, True]]
    assert meter.reduce()["reward/error_fraction"] == 0.25
    too_long = r"model on a:2: .*other: a sequence of \d+ tokens is longer than its con"
    with pytest.raises(RunError, match=too_long):
        rewards.wait(groups[1:], Meter())
    rows[1]["prompt"][0]["role"] = "system"
    refused = r"model on a:2: .*other: its chat template refuses the messages: no system turns"
    with pytest.raises(RunError, match=refused):
        rewards.wait(groups[1:], Meter())
    limits = dict(pack_tokens=30, max_new_tokens=8, max_reward_errors=0.5, dtype="float32")
    args = Args(reward=(f"model:{other}",), **limits)
    with pytest.raises(RunError, match=r"a sequence of \d+ tokens is longer than --pack_tokens"):
        Rewards(args, rows, tokenizer, device).wait(groups[:1], Meter())


def test_model_that_cannot_read_the_prompts_is_refused_at_start(asked, device, tmp_path):
    tokenizer, rows, _ = asked
    bare = save_classifier(tmp_path / "bare", template=None)
    other = save_classifier(tmp_path / "other")
    system = dict(system_prompt="Be brief.")
    turns = "another tokenizer than --model's cannot read completions of several turns"
    for flags, path, words in (
        (dict(), bare, "prompts are messages, but its tokenizer has no chat template"),
        (system, other, "its chat template refuses the messages: no system turns"),
        (dict(environment="calculator"), other, turns),
        (dict(), tmp_path, "the folder has no config.json"),
        (dict(), tmp_path / "none", "no such folder"),
    ):
        named = ("environment",) if flags.get("environment") else ()
        args = Args(reward=(f"model:{path}", *named), **flags)
        with pytest.raises(ValueError, match=f"^--reward .*{words}") as error:
            Rewards(args, rows, tokenizer, device)
        assert "\n" not in str(error.value) and str(path) in str(error.value)
