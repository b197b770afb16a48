"""Judges: their rewards are those of transformers' log-probs of the answers, in the judge's chat
template; pairs are free of the bias to one place; bad rubrics and models are refused."""

import json
import math
from itertools import permutations

import pytest
import torch
from helpers import metrics, write_rows
from in_process import Args
from model.checkpoints import sampled, save_classifier
from processes import run

from common.metrics.meter import Meter
from common.model.hub import resolve_model
from common.parallel.distributed import RunError
from common.rewards.total import Rewards
from common.text.tokenizer import load_tokenizer
from extras.judges.judges import criteria_of

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking | default(true) %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
YES_OR_NO = (
    "Prompt:\nHi\n\nAnswer:\n{}\n\nCriterion: {}\n\n"
    "Does the answer meet the criterion? Reply with one word: yes or no."
)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """Return the folder of a Llama with a tokenizer and a template of its own, whose words are
    likely enough."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = save_classifier(tmp_path_factory.mktemp("judge") / "hf", TEMPLATE, context=1024)
    config = AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    model.save_pretrained(folder)
    return folder


class Oracle:
    """transformers' log-probs of answers to a question, one sequence at a time."""

    def __init__(self, path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    @torch.no_grad()
    def __call__(self, question: str, answer: str) -> float:
        asked = [dict(role="user", content=question)]
        options = dict(tokenize=False, add_generation_prompt=True, enable_thinking=False)
        prompt = self.tokenizer.apply_chat_template(asked, **options)
        before, whole = map(self.ids, (prompt, prompt + answer))
        logits = self.model(input_ids=torch.tensor([whole])).logits[0].double()
        logps = logits.log_softmax(-1)[range(len(whole) - 1), whole[1:]]
        return math.exp(logps[len(before) - 1 :].sum())

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text, in which X stands for the characters of <|im_end|>."""
        start, *rest = text.split("X")
        ids = self.tokenizer(start, add_special_tokens=False)["input_ids"]
        for part in rest:
            ids += self.tokenizer("<|im_end|>", split_special_tokens=True)["input_ids"]
            ids += self.tokenizer(part, add_special_tokens=False)["input_ids"]
        return ids

    def expected(self, question: str, values: dict[str, float]) -> tuple[float, float]:
        """Return the expectation of the values of the answers, and their total probability."""
        probs = {answer: self(question, answer) for answer in values}
        mass = sum(probs.values())
        return sum(p * values[answer] for answer, p in probs.items()) / mass, mass


@pytest.fixture
def asked():
    """Return the policy's tokenizer, a row and a group of completions."""
    tokenizer = load_tokenizer(resolve_model("tiny"))
    row = dict(prompt="Hi", _source="a:1", rubric=["polite", dict(criterion="short", weight=3)])
    texts = ("Hello", "Go", "The same, and longer")
    return tokenizer, row, [sampled(tokenizer, row, "Hi", text) for text in texts]


def scored(reward, asked, device, **flags):
    tokenizer, row, group = asked
    flags = dict(prompt_format="plain", dtype="float32", max_new_tokens=64, **flags)
    args = Args(reward=(str(reward),), **flags)
    return Rewards(args, [row], tokenizer, device).wait([group], Meter())


@pytest.mark.parametrize("own", [False, True])
def test_probability_of_yes_is_that_of_transformers(own, asked, judge, device):
    """The judge is the policy's own checkpoint, or another model with a question that has a column
    of the row, whose special token is text."""
    path, flags, question = resolve_model("tiny"), {}, YES_OR_NO
    if not own:
        asked[1]["ref"] = "<|im_end|>"
        path, question = judge, "Hi X {}: {}, yes or no"
        flags = dict(judge_prompt="{prompt} {ref} {completion}: {criterion}, yes or no")
    oracle = Oracle(path)
    _, parts, numbers = scored(f"judge:{path}", asked, device, share_prefix=16 * own, **flags)
    values = dict(yes=1, Yes=1, no=0, No=0)
    for i, sample in enumerate(asked[2]):
        questions = [question.format(sample.text, criterion) for criterion in ("polite", "short")]
        (polite, mass), (short, other) = (oracle.expected(q, values) for q in questions)
        assert parts["judge"][0, i] == pytest.approx((polite + 3 * short) / 4, abs=1e-4)
        assert numbers["judge/mass"][0, i] == pytest.approx((mass + 3 * other) / 4, rel=1e-3)


def test_pairs_have_no_bias_and_permute_with_the_group(asked, judge, device):
    oracle = Oracle(judge)
    _, parts, numbers = scored(f"rank:{judge}", asked, device)
    texts = [sample.text for sample in asked[2]]
    first = {}  # probability that the first answer is better
    for one, other in permutations(range(3), 2):
        means = []
        for criterion in ("polite", "short"):
            question = (
                f"Prompt:\nHi\n\nAnswer A:\n{texts[one]}\n\nAnswer B:\n{texts[other]}\n\n"
                f"Criterion: {criterion}\n\nWhich answer is better? Reply with one letter: A or B."
            )
            means.append(oracle.expected(question, dict(A=1, B=0))[0])
        first[one, other] = (means[0] + 3 * means[1]) / 4
    for i in range(3):
        others = [j for j in range(3) if j != i]
        wins = [(first[i, j] + 1 - first[j, i]) / 2 for j in others]
        bias = [(first[i, j] + first[j, i]) / 2 - 0.5 for j in others]
        assert parts["rank"][0, i] == pytest.approx(sum(wins) / 2, abs=1e-4)
        assert numbers["rank/position_bias"][0, i] == pytest.approx(sum(bias) / 2, abs=1e-4)
    assert parts["rank"].mean() == pytest.approx(0.5, abs=1e-12)
    for order in permutations(range(3)):
        group = [asked[2][i] for i in order]
        _, permuted, _ = scored(f"rank:{judge}", (*asked[:2], group), device)
        assert permuted["rank"][0].tolist() == [float(parts["rank"][0, i]) for i in order]


def test_equal_completions_are_asked_about_once(asked, judge, device):
    """So their rewards are equal bit for bit, and their advantages are exactly 0."""
    tokenizer, row, group = asked
    equal = [group[0], group[1], sampled(tokenizer, row, "Hi", "Hello"), group[0]]
    for kind in ("judge", "rank"):
        args = Args(reward=(f"{kind}:{judge}",), prompt_format="plain", share_prefix=0)
        scorer = Rewards(args, [row], tokenizer, device).models[kind]
        flops = []
        for samples in (group[:2], equal, [group[0], group[0]]):
            scorer.model.flops = 0
            results = scorer([samples])
            flops.append(scorer.model.flops)
            assert results[0] == results[-1] or samples is not equal
        assert flops[1] == (flops[0] if kind == "judge" else flops[0] + flops[2])


@pytest.mark.slow
def test_rewards_and_win_rates_do_not_depend_on_ranks(judge, main, tmp_path):
    """One rank has one prompt, the other one two."""
    rows = [dict(prompt=text, answer="", rubric=["short"]) for text in ("a", "b", "c")]
    texts = [dict(completions=[f"{row['prompt']} {n}" for n in range(2)]) for row in rows]
    others = [dict(completions=["x", "a longer one"]) for _ in rows]
    for name, lines in (("rows", rows), ("texts", texts), ("others", others)):
        write_rows(tmp_path / f"{name}.jsonl", lines)
    flags = (
        "--dataset", tmp_path / "rows.jsonl", "--completions", tmp_path / "texts.jsonl",
        "--reward", f"judge:{judge}", f"rank:{judge}", "--reward_model", f"rank:{judge}",
        "--against", tmp_path / "others.jsonl", "--prompt_format", "plain",
    )  # fmt: skip
    main("eval", *flags, "--output_dir", tmp_path / "1")
    run(2, "eval.py", *flags, "--output_dir", tmp_path / "2")
    one, two = (json.loads((tmp_path / ranks / "results.json").read_text()) for ranks in "12")
    names = ["judge", "rank", "judge/mass", "rank/position_bias", "rank/mass"]
    assert list(one["overall"]["rewards"]) == names
    assert one["reward_model"]["mean"] + one["reward_model_against"]["mean"] == pytest.approx(1)
    for name in ("reward_model", "win_rate"):
        assert two[name] == pytest.approx(one[name], rel=1e-5)
    for name, found in one["overall"]["rewards"].items():
        assert two["overall"]["rewards"][name] == pytest.approx(found, rel=1e-5)


def test_question_that_does_not_fit_is_an_error_of_its_sample(asked, judge, device):
    tokenizer, row, group = asked
    group[1].text = "x" * 2000
    with pytest.raises(RunError, match=r"judge on a:1: .* is longer than its context of 1024"):
        scored(f"judge:{judge}", asked, device)
    flags = dict(max_reward_errors=0.5)
    total, parts, _ = scored(f"rank:{judge}", asked, device, **flags)
    assert total.isnan().tolist() == [[False, True, False]]
    assert parts["rank"][0, 0] + parts["rank"][0, 2] == pytest.approx(1)
    group[1].text = "\U00100000"
    with pytest.raises(RunError, match="judge on a:1: .*beyond U.FFFFF cannot be read"):
        scored(f"judge:{judge}", asked, device)
    (only,), _, _ = scored(f"rank:{judge}", (tokenizer, row, group[:1]), device)
    assert only.isnan().all()  # held-out prompts have one completion


def test_rubric_may_be_json_text():
    rubric = [dict(criterion="short", weight=3.0), dict(criterion="polite")]
    for one in (rubric, rubric[0], ["[short"], "[short"):
        row = dict(_source="a:1", rubric=one)
        text = row | dict(rubric=one if one == "[short" else json.dumps(one))
        assert criteria_of(text, Args()) == criteria_of(row, Args())


@pytest.mark.parametrize(
    ("rubric", "message"),
    [
        ([], "column rubric: "),
        ("", "column rubric: criterion 1: criterion: String should have at least 1 character"),
        (["a", dict(weight=1)], "column rubric: criterion 2: criterion: Field required"),
        ([dict(criterion="a", weight=-1)], "column rubric: criterion 1: weight: .* or equal to 0"),
        ([dict(criterion="a", weight=0)], "column rubric: all weights are 0; give a"),
        ([dict(criterion="a", points=2)], "column rubric: criterion 1: points: Extra inputs"),
        (None, "no rubric; add a column rubric, or set --rubric"),
    ],
)
def test_bad_rubric_names_the_row(rubric, message, asked, judge, device):
    asked[1]["rubric"] = rubric
    with pytest.raises(ValueError, match=f"^a:1: {message}") as error:
        scored(f"judge:{judge}", asked, device)
    assert "\n" not in str(error.value)


def test_model_or_question_that_cannot_judge_is_refused(asked, judge, device, tmp_path):
    bare = save_classifier(tmp_path / "bare", template=None)
    thinks = save_classifier(tmp_path / "thinks", TEMPLATE.replace("enable_thinking", "always"))
    for folder in (bare, thinks):
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = ["LlamaForCausalLM"]
        (folder / "config.json").write_text(json.dumps(config))
    scorer = save_classifier(tmp_path / "scorer", TEMPLATE)
    for reward, flags, message in (
        (f"judge:{bare}", {}, "its tokenizer has no chat template; name a chat model"),
        (f"judge:{thinks}", {}, "its chat template opens a thought; name a model that answers at"),
        (f"judge:{scorer}", {}, "a reward model (it has score.weight), not a language model"),
        (f"model:{judge}", {}, "a language model without a reward head"),
        (f"judge:{judge}", dict(judge_prompt="{criterion}"), "has no {completion} or {transcript}"),
        (f"rank:{judge}", dict(judge_prompt="{first}"), "has no {first} and {second}; --reward ra"),
        (f"judge:{judge}", dict(judge_prompt="{completion}"), "no {criterion} for the rubric"),
        (f"judge:{judge}", dict(judge_prompt="{completion} {a}{criterion}"), "no column a"),
    ):
        with pytest.raises(ValueError) as error:
            scored(reward, asked, device, **flags)
        assert message in str(error.value) and "\n" not in str(error.value)


def test_run_trains_on_judges_and_logs_their_numbers(online, main, tmp_path):
    """The judge is the policy's own checkpoint. A held-out prompt has one completion, so that pairs
    give it no reward."""
    flags = ("--reward", f"judge:{online[1]}", f"rank:{online[1]}", "--max_steps", 1,
             "--judge_prompt", "{prompt}{completion}{first}{second}", "--samples_per_prompt", 2,
             "--max_new_tokens", 4, "--eval_every", 1, "--eval_size", 2)  # fmt: skip
    main("grpo", *online, *flags, "--output_dir", tmp_path)
    found = {name: value for line in metrics(tmp_path) for name, value in line.items()}
    assert found["rewards/rank/mean"] == pytest.approx(0.5) and 0 < found["rewards/judge/mean"] < 1
    assert -0.5 < found["rewards/rank/position_bias"] < 0.5 and 0 < found["rewards/judge/mass"] < 1
    assert 0 < found["eval/rewards/judge/mean"] < 1 and "eval/rewards/rank/mean" not in found
