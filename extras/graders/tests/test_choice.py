"""The rewards `choice` and `stated`: the forms of an answer, the forms of a row, bad rows."""

import importlib
import json

import pytest

from common.evaluate import completions_file
from common.model.tiny import tiny_model
from common.packs.sample import Completion
from common.rewards.registry import load_reward, require_usable_row
from common.rewards.total import Rewards
from common.text.tokenizer import load_tokenizer
from extras.graders.choice import LETTERS, choice, option_columns, options_of, stated

evaluation = importlib.import_module("eval")  # `import eval` would hide the builtin
CITIES = ["London", "Paris", "Rome", "A town on the Seine"]
ECHO = "A. London\nB. Paris\nC. Rome\nD. A town on the Seine\n"


def stated_letter(completion: str, options: list[str]) -> str:
    """Return the letters of those options for which the completion would get 1."""
    rows = [dict(options=options, answer=i, _source="a:1") for i in range(len(options))]
    return "".join(LETTERS[i] for i, row in enumerate(rows) if choice(completion, row))


@pytest.mark.parametrize(
    "completion, letter",
    [
        # the letter alone
        ("B", "B"), ("(B)", "B"), ("B.", "B"), ("(b)", "B"), (" **B** \n", "B"), ("[B]", "B"),
        ("`B`", "B"), ("$B$", "B"), ("- B", "B"), ("B\n\nParis is the capital of France.", "B"),
        # the letter with the text, and the text
        ("B. Paris", "B"), ("**B) Paris**", "B"), ("B: Paris.", "B"), ("paris.", "B"),
        ("**Paris**\n\nIt lies on the Seine.", "B"), ("A town on the Seine", "D"),
        # boxes
        (r"so \boxed{\text{B}}.", "B"), (r"$\boxed{(B)}$", "B"), (r"\boxed{\mathbf{B}}", "B"),
        (r"\boxed{B. Paris}", "B"), (r"\boxed{\text{Paris}}", "B"), (r"\[\boxed{B}\]", "B"),
        (r"\boxed{ b }", "B"), (r"\boxed{A}, no: \boxed{B}", "B"), (r"\boxed{\textbf{(B)}}", "B"),
        # announced
        ("The answer is (B).", "B"), ("the answer is **B**", "B"), ("ANSWER: B) Paris", "B"),
        ("The correct answer is: B", "B"), ("**Answer:** B", "B"), ("**Answer: B**", "B"),
        ("Final Answer: The final answer is $B$.", "B"), ("#### B", "B"), ("Answer:\n\n**B**", "B"),
        ("The correct option is B because it is the capital.", "B"), ("I choose B.", "B"),
        ("The answer to this question is therefore (B), Paris.", "B"), ("I'd go with B.", "B"),
        ("<answer>B</answer>", "B"), ('{"answer": "B"}', "B"), ("### Final Answer\n\nB", "B"),
        ("Answer: Paris, of course", "B"), (r"Answer: \(B\)", "B"), ("answer=B", "B"),
        (r"The answer is $\boxed{B}$.", "B"), ("The answer is A town on the Seine.", "D"),
        ("The answer is definitely the letter B!", "B"), ("The answer is B, not A.", "B"),
        ("The answer is B (not A or C).", "B"), ("The answer is B and the others are wrong.", "B"),
        # called right
        ("(B) is correct.", "B"), ("So option B is the right choice.", "B"),
        ("**B** is the correct answer, as A is too far north.", "B"),
        ("Paris is correct.", "B"), (ECHO + "\n**B**", "B"),
        # the only one that the last line names
        ("Paris is a capital.\nSo it must be (B).", "B"), ("Not London, hence option B.", "B"),
        ("It can only be **B**!", "B"), ("It is (B), not (A).", ""),
        # the last statement counts
        ("The answer is A. Wait, no. The answer is B.", "B"), ("A\nNo: \nB is correct.", "B"),
        ("B is correct? No. The answer is C.", "C"), (ECHO + "\nThe answer is B.", "B"),
        (r"\boxed{A} was too fast. Answer: B", "B"), ("The answer is B.\n\n**C**", "C"),
        # articles, pronouns and other words
        ("A good question.", ""), ("The answer is A lot of work away.", ""), ("A", "A"),
        ("Answer: I think it lies in France.", ""), ("The answer is A B C.", ""),
        ("A town is a place. Vitamin C is not.", ""), ("The answer is not B.", ""),
        ("The answer isn't B.", ""), ("Answer: Barcelona", ""), ("Parisian", ""),
        ("The answer choices are A and B. The answer is B.", "B"),
        # several, none, unknown letters
        ("", ""), ("The answer is A or B.", ""), ("Answer: A, B", ""), (r"\boxed{A and B}", ""),
        ("The answer is B. Or rather: the answer is either A or C", ""), ("(A) or (B)", ""),
        ("Answer: A/B", ""), ("A\nB\nC\nD", ""), (ECHO, ""), ("Answer: E", ""), ("Answer:", ""),
        ("The answer is B. No, the answer is F.", ""), ("Answer: **A** or **B**", ""),
        (r"\boxed{", ""),
    ],
)  # fmt: skip
def test_choice_reads_the_last_statement(completion, letter):
    assert stated_letter(completion, CITIES) == letter


@pytest.mark.parametrize(
    "completion, options, letter",
    [
        ("The answer is 12.5", ["12", "12.5", "1", "-12"], "B"),
        ("The answer is 12.", ["12", "12.5", "1", "-12"], "A"),
        (r"\boxed{-12}", ["12", "12.5", "1", "-12"], "D"),
        ("The answer is 12 million.", ["12", "12.5"], ""),
        ("答案是12万。", ["12", "12.5"], ""),
        ("The answer is 2", ["2", "2", "3"], ""),  # which 2?
        ("The answer is B", ["2", "2", "3"], "B"),
        ("The answer is B.", ["O", "A", "B", "AB"], "B"),  # a letter is a letter
        ("The answer is AB.", ["O", "A", "B", "AB"], "D"),
        ("The answer is both A and B.", ["A only", "B only", "Both A and B", "neither"], "C"),
        ("The answer is red and blue.", ["red", "red and blue"], "B"),
        ("The answer is J.", [str(i * i) for i in range(10)], "J"),
        ("Answer: I", [str(i * i) for i in range(10)], "I"),
        (r"\boxed{\frac{1}{2}}", [r"\frac{1}{2}", r"\frac{1}{3}"], "A"),
        ("The answer is x < 3.", ["x > 3", "x < 3"], "B"),
        ("Z", [str(i) for i in range(26)], "Z"),
    ],
)
def test_choice_reads_texts_of_many_kinds(completion, options, letter):
    assert stated_letter(completion, options) == letter


LABELS = ["123", ["i", "ii", "iii"], "FGH", "①②③", [1, 2, 3], ["10", "20", "30"]]
LABELLED = [
    "@", "(@)", "\\boxed{@}", "@. green", "@) green", "The answer is @.", "**@**", "Answer: (@)",
    "答案：@", "It can only be **@**!", "Hence option @.", "@ is correct.",
    "I see 5 cars.\nSo the answer is @", "B", "The answer is B.", "green",
]  # fmt: skip


@pytest.mark.parametrize("labels", LABELS)
def test_label_counts_as_its_letter(labels):
    choices = dict(text=["red", "green", "blue"], label=list(labels))
    rows = [dict(choices=choices, answerKey=label, _source="a:1") for label in labels]
    for form in LABELLED:
        text = form.replace("@", str(labels[1]))
        assert [choice(text, row) for row in rows] == [0, 1, 0], text
    for text in (
        "The answer is @ cars.",
        "@ or B or C",
        "The answer is @.5",
        "The answer is @ million",
    ):
        assert choice(text.replace("@", str(labels[1])), rows[1]) == 0, text


def test_text_of_an_option_comes_before_a_label():
    row = dict(
        choices=dict(text=["2", "3", "7"], label=["1", "2", "3"]), answerKey="1", _source="a"
    )
    assert choice("The answer is 2.", row) == 1 and choice("The answer is 1.", row) == 1


def test_votes_are_what_the_reward_reads():
    row = dict(options=CITIES, answer="B", _source="a:1")
    texts = ["The answer is B.", "After some thought, the answer is (B).", "Answer: B", "**Paris**"]
    assert {choice.vote(text, row) for text in texts} == {"B"}
    assert choice.vote("A or B", row) != "B" and not choice.vote("who knows", row)
    texts = ["The answer is True.", "**Answer:** true", "so\nTrue", r"\boxed{true}"]
    assert {stated.vote(text, dict(answer="True")) for text in texts} == {"true"}
    texts = ["The answer is (B).", "The answer is B", r"\boxed{\text{B}}"]
    assert len({stated.vote(text, dict(answer="(B)")) for text in texts}) == 1


def test_a_vote_is_what_the_reward_reads(device):
    """Two of five completions say A, in three forms; all others say B."""
    texts = [
        "The answer is B.",
        "After some thought, the answer is (B).",
        "Answer: B",
        "A",
        r"\boxed{A}",
    ]
    row = dict(options=["x", "y"], answer="B", _source="rows:1")
    group = [Completion([1, 2], [False, True], 1, row, text=t, finish_reason="stop") for t in texts]
    args = evaluation.Args(reward="choice")
    rewards = Rewards(args, [row], load_tokenizer(tiny_model()), device)
    lines = completions_file.make_lines([group], rewards, greedy=False)
    assert evaluation.measure(args, lines)["majority_at_k"][5]["mean"] == 1


STATED = [
    "Answer：@", "The answer is @。", "@。", "答案：@", "答案: @", "答案是@。", "答案为@", "选@",
    "故选@。", "所以选择@。", "（@）", "Answer: （@）", "答案是\\boxed{@}", "正确答案是选项@",
    "答案应为@，因为它最好", "答えは@です。", "정답은 @입니다.", "@是正确的。", "【答案】@",
    "本题选@", "答案：**@**", "A，不。答案是@。", "La respuesta correcta es @.",
    "Die Antwort ist @.", "A\n\n答案：@", "答案　@",
]  # fmt: skip
UNSTATED = [
    "不选@", "答案不是@", "答案是A或@", "答案是A、@", "答案是A和@", "@不正确", "@是错误的",
    "选@，不对，答案是A",
]  # fmt: skip
OPTIONS = [
    ["red", "green", "blue"], ["红色", "绿色", "蓝色"], ["1", "2", "12"], ["红", "红色", "红色的"],
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_choice_reads_marks_and_words_of_other_scripts(options):
    for shown in ("B", "Ｂ", "𝐁"):
        for form in STATED:
            assert stated_letter(form.replace("@", shown), options) == "B", form
        for form in UNSTATED:
            assert stated_letter(form.replace("@", shown), options) in ("", "A"), form
    for form in ("答案：@。", "@", "**@**。", "\\boxed{@}", "Answer：@", "答案是@"):
        assert stated_letter(form.replace("@", options[1]), options) == "B", form


# ---- rows ----

GPQA = {"Correct Answer": "right\n", "Incorrect Answer 1": "a", "Incorrect Answer 2": "b"}
GPQA |= {"Incorrect Answer 3": "c", "_source": "a:1"}
ARC = dict(text=["x", "y", "z"], label=["1", "2", "3"])


@pytest.mark.parametrize(
    "row, right",
    [
        (dict(choices=["x", "y"], answer=0), 0),  # MMLU
        (dict(choices=["x", "y"], answer=1.0), 1),  # of a table with gaps
        (dict(options=["x", "y", "z"], answer="C", answer_index=2), 2),  # MMLU-Pro
        (dict(choices=ARC, answerKey="2"), 1),  # ARC
        (dict(options=["x", "y"], answer="y"), 1),
        (dict(options=None, choices=["x", "y"], answer="A", answerKey=None), 0),
        (dict(options=json.dumps(["x", "y"]), answer=1), 1),
        (dict(choices=json.dumps(ARC), answerKey="2"), 1),
    ],
)
def test_the_right_option_of_a_row(row, right):
    assert options_of(row | dict(_source="a:1"))[1] == right


def test_options_of_gpqa_have_an_order_of_their_own():
    options, right = options_of(GPQA)
    assert options[right] == "right" and sorted(options) == ["a", "b", "c", "right"]
    assert options_of(GPQA) == (options, right)
    places = [options_of(GPQA | {"Incorrect Answer 1": str(i)})[1] for i in range(400)]
    assert all(70 < places.count(place) < 130 for place in range(4))
    columns = option_columns(GPQA)
    letter = columns["right_letter"]
    assert f"{letter}. right" in columns["lettered_options"].split("\n")
    assert choice(f"The answer is {letter}.", GPQA) == 1


@pytest.mark.parametrize(
    "row, problem",
    [
        (dict(answer="A"), "no options; expected the columns options or choices or Correct Answer"),
        (dict(GPQA, **{"Incorrect Answer 2": None}), "no options"),
        (dict(options=["x", "y"]), "no answer; expected a column answer or answerKey"),
        (dict(options=["x"], answer="A"), "column options: expected 2 to 26 options, got 1"),
        (dict(choices=["x"] * 27, answer=0), "column choices: expected 2 to 26 options, got 27"),
        (dict(options=["x", "y"], answer="C"), "answer 'C' is none of the 2 options"),
        (dict(options=["x", "y"], answer=2), "answer 2 is none of the 2 options"),
        (dict(options=["x", "x"], answer="x"), "answer 'x' is none"),
        (dict(options=["x", None], answer="A"), "column options: expected a list of texts"),
        (dict(options=dict(label=["A"]), answer="A"), "column options: expected a list of texts"),
    ],
)
def test_bad_row_is_refused_in_one_line(row, problem):
    with pytest.raises(ValueError) as error:
        require_usable_row("choice", load_reward("choice"), row | dict(_source="a:1"))
    said = str(error.value)
    assert said.startswith(f"a:1: {problem}") and "\n" not in said
    assert said.endswith("(--reward choice)")


# ---- stated ----


@pytest.mark.parametrize(
    "completion, answer, reward",
    [
        ("not ( True ) is False. So the answer is False.", "False", 1),
        ("The answer is (B).", "(B)", 1), ("The answer is B.", "(B)", 1),
        ("The answer is (B) 01/02/2021.", "(B)", 1), (r"\boxed{(B)}", "(B)", 1),
        (r"\boxed{\text{B}}", "(B)", 1), ("The answer is (C).", "(B)", 0),
        ("The answer is (A) or (B).", "(A)", 0), ("The answer is therefore False.", "False", 1),
        ("The answer is the red ball.", "The red ball", 1), (r"\boxed{Truee", "True", 0),
        ("**Answer:** yes", "Yes", 1), ("The answer is True. No: the answer is False.", "True", 0),
        ("The answer is 24", "24", 1), ("The answer is -24.", "24", 0),
        ("The answer is 240", "24", 0), (r"so $\boxed{24}$.", "24", 1),
        ("The answer is: apple  banana cherry", "apple banana cherry", 1),
        ("The answer is ] ) }", "] ) }", 1), ("The answer is ) }", "] ) }", 0),
        (r"\boxed{] ) }}", "] ) }", 1), ("<answer>valid</answer>", "valid", 1),
        ("It follows.\ninvalid", "invalid", 1), ("Yes", "Yes", 1),
        ("Yes, it is plausible.", "yes", 0), ("答案：巴黎。", "巴黎", 1), ("答案是巴黎", "巴黎", 1),
        ("答案不是巴黎", "巴黎", 0), ("The answer is １，０００．", "1000", 1),
        ("The answer is 1,00", "100", 0), ("It is\ncafe\u0301", "café", 1),
        ("The answer is café.", "cafe\u0301", 1), ("The answer is caf\u00e8.", "café", 0),
        ("The answer is 0.5", "½", 1), ("", "yes", 0),
    ],
)  # fmt: skip
def test_stated_compares_the_rest_of_the_line(completion, answer, reward):
    assert stated(completion, dict(answer=answer)) == reward
