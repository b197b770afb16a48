"""What a command finds here in place of what its user has: models and data of the hub, files of
rows and functions, and finished runs.

A model is a tiny random one of the same type with the real chat template and the real tokenizer,
whose merges end after the first 2,000. A data set has ten rows with the columns and types of its
card."""

import fcntl
import gzip
import hashlib
import json
import re
import shutil
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from field.families import TRL
from field.real_tokenizers import BUILD, tokenizer
from helpers import ROOT
from PIL import Image
from tokenizers import AddedToken
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast

from common.model.loading import model_class

MERGES = 2000  # a rank reads the tokenizer of a command in milliseconds
TEXT = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=40960, tie_word_embeddings=True,
    bos_token_id=None,
)  # fmt: skip
EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)  # fmt: skip
DELTA = EXPERTS | dict(
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=1,
    linear_num_value_heads=2, linear_key_head_dim=32, linear_value_head_dim=32,
)  # fmt: skip
VISION = dict(hidden_size=32, intermediate_size=64, patch_size=8, num_attention_heads=2)
QWEN_VISION = VISION | dict(
    depth=2, num_heads=2, spatial_merge_size=2, out_hidden_size=32, num_position_embeddings=64,
    temporal_patch_size=2, deepstack_visual_indexes=[0, 1],
)  # fmt: skip
QWEN_PIXELS = dict(
    image_processor_type="Qwen2VLImageProcessor", patch_size=8, temporal_patch_size=2,
    merge_size=2, size=dict(shortest_edge=256, longest_edge=4096),
)  # fmt: skip
SMOL_PIXELS = dict(
    image_processor_type="SmolVLMImageProcessor", resample=1, size=dict(longest_edge=64),
    max_image_size=dict(longest_edge=32),
)  # fmt: skip
ROPE = dict(rope_type="default", rope_theta=1e4)
QWEN3 = dict(kind="qwen3", words="qwen", template="qwen3", ends=["<|im_end|>", "<|endoftext|>"])
BASE = QWEN3 | dict(ends=["<|endoftext|>"])
THINKING = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B")
PYTHIA = dict(kind="gpt_neox", words="smollm2", template=None, ends=["<|endoftext|>"],
              num_key_value_heads=4, head_dim=8)  # fmt: skip
whole = cache(tokenizer)
MODELS: dict[str, dict] = {
    "Qwen/Qwen3-0.6B": QWEN3, "Qwen/Qwen3-1.7B": QWEN3,
    "Qwen/Qwen3-8B": QWEN3 | dict(hidden_size=64),  # --quantize packs blocks of 64
    "Qwen/Qwen3-1.7B-Base": BASE, "Qwen/Qwen3-8B-Base": BASE,
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN3 | dict(kind="qwen2", template="qwen2_5"),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": QWEN3 | DELTA | dict(
        kind="qwen3_next", template="qwen3_instruct_2507"
    ),
    "Qwen/Qwen3-VL-2B-Instruct": QWEN3 | dict(
        kind="qwen3_vl", template="qwen3_vl", vision=QWEN_VISION, pixels=QWEN_PIXELS,
        rope_parameters=ROPE | dict(mrope_section=[6, 5, 5], mrope_interleaved=True),
        special=["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    ),
    "HuggingFaceTB/SmolVLM-256M-Instruct": dict(
        kind="smolvlm", words="smollm2", template="smolvlm", ends=["<end_of_utterance>"],
        vision=VISION | dict(num_hidden_layers=2, image_size=32), pixels=SMOL_PIXELS,
        special=["<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>",
                 *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7))],
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": dict(
        kind="llama", words="smollm2", template="qwen2_5", ends=["<|im_end|>"]
    ),
    "meta-llama/Llama-3.1-8B-Instruct": dict(
        kind="llama", words="llama3", template="llama3_1", ends=["<|eot_id|>"]
    ),
    "EleutherAI/pythia-410m-deduped": PYTHIA, "EleutherAI/pythia-6.9b-deduped": PYTHIA,
}  # fmt: skip


def write_model(
    folder: Path, kind: str, words: str, template: str | None, ends: list[str],
    special: Sequence[str] = (), vision: dict | None = None, pixels: dict | None = None, **text,
) -> None:  # fmt: skip
    made = with_few_merges(whole(words))
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made.eos_token, made.pad_token = ends[0], ends[-1]
    made.chat_template = template and (TRL / f"{template}.jinja").read_text()
    made.save_pretrained(folder)
    end_ids = made.convert_tokens_to_ids(ends)
    fields = TEXT | text | dict(vocab_size=len(made), eos_token_id=end_ids, pad_token_id=end_ids[0])
    if vision:
        inner = "llama" if kind == "smolvlm" else f"{kind}_text"
        tokens = {
            name: made.convert_tokens_to_ids(token)
            for name, token in dict(
                image_token_id="<image>" if kind == "smolvlm" else "<|image_pad|>",
                video_token_id="<|video_pad|>", vision_start_token_id="<|vision_start|>",
                vision_end_token_id="<|vision_end|>",
            ).items() if token in made.get_vocab()
        }  # fmt: skip
        fields = tokens | dict(
            text_config=fields | dict(model_type=inner), vision_config=vision, scale_factor=2,
            tie_word_embeddings=True, eos_token_id=end_ids, pad_token_id=end_ids[0],
        )  # fmt: skip
        if kind != "smolvlm":
            del fields["scale_factor"]
        mean = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
        (folder / "preprocessor_config.json").write_text(json.dumps(pixels | mean))
    config = AutoConfig.for_model(kind, **fields, dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(folder.name.encode()))
        model = model_class(config).from_config(config)
        for parameter in model.parameters():  # so that samples and gradients are no noise
            if parameter.ndim > 1:
                parameter.data *= 4
    model.generation_config = GenerationConfig(eos_token_id=end_ids, pad_token_id=end_ids[0])
    model.save_pretrained(folder)


def with_few_merges(whole: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return the tokenizer with its first merges only: each rank reads it, and the model has a row
    for each of its tokens."""
    state = json.loads(whole.backend_tokenizer.to_str())
    model, added = state["model"], state["added_tokens"]
    special = {token["content"] for token in added}
    ordered = sorted(model["vocab"].keys() - special, key=model["vocab"].get)
    kept = [t for i, t in enumerate(ordered) if i < 256 + MERGES or len(t) == 1]
    known = {*kept}
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    model["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= known]
    new = {token: i for i, token in enumerate([*kept, *(t["content"] for t in added)])}
    model["vocab"] = {token: new[token] for token in kept}
    for token in added:
        token["id"] = new[token["content"]]
    for part in (state["post_processor"] or {}).get("processors", []):
        for name, token in part.get("special_tokens", {}).items():
            token["ids"] = [new[name]]
    made = PreTrainedTokenizerFast(tokenizer_object=type(whole.backend_tokenizer).from_str(
        json.dumps(state)))  # fmt: skip
    named = {k: v for k, v in whole.special_tokens_map.items() if isinstance(v, str)}
    made.add_special_tokens(named)
    return made


# ---- data of the hub: {configuration: (splits, row)}, by the columns on the data set's card ----


def chat(*turns: str) -> list[dict]:
    return [dict(role=("user", "assistant")[i % 2], content=turn) for i, turn in enumerate(turns)]


def picture(i: int) -> Image.Image:
    return Image.new("RGB", (40 + i, 32), (20 * i, 0, 99))


def options(i: int) -> list[str]:
    return [str(i + k) for k in range(4)]


def pair_of_texts(i: int) -> dict:
    return dict(prompt=f"POST: {i} cats.\n\nTL;DR:", chosen=f" I have {i} cats", rejected=" A dog")


def problem(i: int, **more: object) -> dict:
    return dict(problem=f"What is {i} + {i}?", answer=str(2 * i)) | more


def instruction(i: int) -> dict:
    names = "num_words relation keyword language".split()
    wanted = dict.fromkeys(names) | dict(num_words=9, relation="at least")
    return dict(key=i, prompt=f"Write 9 words or more about {i}.", kwargs=[wanted],
                instruction_id_list=["length_constraints:number_words"])  # fmt: skip


def gpqa(i: int) -> dict:
    wrong = {f"Incorrect Answer {k}": str(i + k) for k in (1, 2, 3)}
    return wrong | {"Question": f"What is {i}?", "Correct Answer": str(i), "Subdomain": "Sums",
                    "High-level domain": "Physics", "Record ID": f"rec{i}"}  # fmt: skip


BOTH, ALL = ("train", "test"), ("train", "validation", "test")
HUB = {
    "openai/gsm8k": dict.fromkeys(("main", "socratic"), (BOTH, lambda i: dict(
        question=f"Tom has {i} pens and buys {i}. How many?",
        answer=f"He has {i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i}"))),
    "trl-lib/Capybara": dict(default=(BOTH, lambda i: dict(
        source="Airoboros", messages=chat(f"Hi {i}", "Hello", "Who?", "I"), num_turns=2))),
    "trl-lib/ultrafeedback_binarized": dict(default=(BOTH, lambda i: dict(
        chosen=chat(f"Say {i}", f"It is {i}."), rejected=chat(f"Say {i}", "No."),
        score_chosen=8.5, score_rejected=3.0))),
    "trl-lib/ultrafeedback-prompt": dict(default=(BOTH, lambda i: dict(prompt=chat(f"Say {i}")))),
    "trl-lib/kto-mix-14k": dict(default=(BOTH, lambda i: dict(
        prompt=chat(f"Say {i}"), completion=chat(f"Say {i}", f"{i}.")[1:], label=i % 2 == 0))),
    "trl-lib/tldr": dict(default=(ALL, lambda i: dict(
        prompt=f"POST: {i} cats.\n\nTL;DR:", completion=f" I have {i} cats"))),
    "trl-lib/tldr-preference": dict(default=(("train", "validation"), pair_of_texts)),
    "agentica-org/DeepScaleR-Preview-Dataset": dict(default=(("train",), lambda i: problem(
        i, solution=f"It is \\boxed{{{2 * i}}}."))),
    "HuggingFaceH4/aime_2024": dict(default=(("train",), lambda i: problem(
        i, id=i, solution="Add.", url="https://artofproblemsolving.com", year="2024"))),
    "math-ai/aime25": dict(default=(("test",), lambda i: problem(i, id=str(i)))),
    "math-ai/aime26": dict(default=(("test",), lambda i: problem(i, id=str(i)))),
    "HuggingFaceH4/MATH-500": dict(default=(("test",), lambda i: problem(
        i, solution=f"\\boxed{{{2 * i}}}", subject="Algebra", level=1, unique_id=f"{i}.json"))),
    "DigitalLearningGmbH/MATH-lighteval": dict(default=(BOTH, lambda i: dict(
        problem=f"What is {i} + {i}?", level="Level 1", type="Algebra",
        solution=f"It is $\\boxed{{{2 * i}}}$."))),
    "allenai/ai2_arc": dict.fromkeys(("ARC-Challenge", "ARC-Easy"), (ALL, lambda i: dict(
        id=str(i), question=f"What is {i}?", answerKey="A",
        choices=dict(text=options(i), label=list("ABCD"))))),
    "cais/mmlu": dict(all=(("auxiliary_train", "test", "validation", "dev"), lambda i: dict(
        question=f"What is {i}?", subject="anatomy", choices=options(i), answer=0))),
    "TIGER-Lab/MMLU-Pro": dict(default=(("test", "validation"), lambda i: dict(
        question_id=i, question=f"What is {i}?", options=options(i), answer="A", answer_index=0,
        cot_content=f"A: It is {i}. The answer is (A).", category="math", src="ori"))),
    "Idavidrein/gpqa": dict.fromkeys(("gpqa_diamond", "gpqa_main"), (("train",), gpqa)),
    "lukaemon/bbh": dict.fromkeys(("boolean_expressions", "date_understanding"), (("test",),
        lambda i: dict(input=f"What is {i}?", target=str(i)))),
    "google/IFEval": dict(default=(("train",), instruction)),
    "openai/openai_humaneval": dict(openai_humaneval=(("test",), lambda i: dict(
        task_id=f"HumanEval/{i}", prompt=f"def f():\n    \"\"\"Return {i}.\"\"\"\n",
        canonical_solution=f"    return {i}\n", entry_point="f",
        test=f"def check(candidate):\n    assert candidate() == {i}\n"))),
    "google-research-datasets/mbpp": dict(sanitized=((*ALL, "prompt"), lambda i: dict(
        source_file="a.ipynb", task_id=i, prompt=f"Write a function f that returns {i}.",
        code=f"def f():\n    return {i}", test_imports=["import math"],
        test_list=[f"assert f() == {i}", f"assert f() != {i + 1}"]))),
    "hiyouga/geometry3k": dict(default=(ALL, lambda i: dict(
        images=[picture(i)], problem=f"<image>Find x if y = {i}.", answer=str(i)))),
    "BUAADreamer/clevr_count_70k": dict(default=(ALL, lambda i: dict(
        images=[picture(i)], problem="<image>How many items are there?", answer=str(i)))),
}  # fmt: skip
LABELS = {"cais/mmlu": dict(answer=["A", "B", "C", "D"])}  # columns of class numbers


def write_data(folder: Path, name: str) -> None:
    """Write the repository of a data set: parquet files and the card that names them."""
    import datasets

    datasets.disable_progress_bars()
    card = []
    for config, (splits, row) in HUB[name].items():
        table = datasets.Dataset.from_list([row(i) for i in range(1, 11)])
        for column, names in LABELS.get(name, {}).items():
            table = table.cast_column(column, datasets.ClassLabel(names=names))
        files = []
        for split in splits:
            (folder / config).mkdir(parents=True, exist_ok=True)
            table.to_parquet(folder / config / f"{split}.parquet")
            files.append(dict(split=split, path=f"{config}/{split}.parquet"))
        card.append(dict(config_name=config, data_files=files))
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(card)}\n---\n")


VERSION = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


def hub(name: str = "") -> Path:
    """Return the folder of a model or data set of the hub, which is written once, or that of all of
    them, which is named after this file."""
    folder = BUILD / "stand_ins" / VERSION
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if name and not (folder / name / "done").is_file():
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir(parents=True)
            if name in HUB:
                write_data(folder / name, name)
            else:
                write_model(folder / name, **MODELS[name])
            (folder / name / "done").touch()
    return folder / name


# ---- files of a user: rows, or the code block of a page ----


def block(page: str, text: str, before: str = "") -> str:
    """Return the code block of a page that has this text."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    return before + next(code for code in blocks if text in code)


def rows(**columns: object) -> list[dict]:
    texts = [json.dumps(columns).replace("NUMBER", str(i)) for i in range(1, 11)]
    return [json.loads(text) for text in texts]


ANSWERS = rows(prompt="Say NUMBER", completion="It is NUMBER.", answer="NUMBER")
PAIRS = rows(prompt="Say NUMBER", chosen="It is NUMBER.", rejected="No.")
TOWNS = "COUNTS = {}\n"
AGENT = "run_tests, score = str, lambda row, text: len(text) % 3\n"
FILES: dict[str, list[dict] | Callable[[], str]] = dict.fromkeys(
    "rows.jsonl prompts.jsonl train.jsonl test.jsonl path/to/train.jsonl a.jsonl b.jsonl "
    "best.jsonl cities.jsonl questions.jsonl data/*.jsonl.gz".split(), ANSWERS
) | {
    "pairs.jsonl": PAIRS,
    "chats.jsonl": rows(messages=chat("Say NUMBER", "NUMBER")),
    "ROWS.jsonl": [one | other for one, other in zip(ANSWERS, PAIRS, strict=True)],
    "docs/data.md:a.jsonl": rows(messages=chat("Say NUMBER", "NUMBER")),
    "docs/data.md:b.jsonl": rows(messages=chat("Say NUMBER", "NUMBER")),
    "docs/environments.md:tasks.jsonl": rows(price=7),
    "extras/agents/README.md:tasks.jsonl": rows(task="Write NUMBER"),
    "extras/images/README.md:rows.jsonl": rows(
        images=["a.png"], prompt="<image>What is this?", completion="A cat."
    ),
    "extras/images/README.md:prompts.jsonl": rows(
        images=["a.png"], prompt="<image>What is this?", answer="A cat."
    ),
    "make_rows.py": lambda: block("docs/your_data.md", "random.Random(0)"),
    "docs/your_data.md:my_rewards.py": lambda: block("docs/your_data.md", "def right_date"),
    "docs/real_model.md:my_rewards.py": lambda: block("docs/real_model.md", "def score"),
    "my_rewards.py": lambda: block("docs/rewards.md", "def score"),
    "shop.py": lambda: block("docs/environments.md", "class Shop"),
    "my_agent.py": lambda: block("extras/agents/README.md", "async def run", AGENT),
    "my_tools.py": lambda: block("extras/tools/README.md", "def population", TOWNS),
}  # fmt: skip


def write_file(name: str, path: Path) -> None:
    """Write a file, with the picture that its rows may name."""
    content = FILES[name]
    if callable(content):
        content = content()
    else:
        content = "".join(json.dumps(row) + "\n" for row in content)
        if "a.png" in content:
            picture(1).save(path.with_name("a.png"))
    path = path.with_name(path.name.replace("*", "1"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content.encode())) if path.suffix == ".gz" else (
        path.write_text(content)
    )


LOCAL_MODELS = {"./my_model": "Qwen/Qwen3-1.7B", "MODEL": "Qwen/Qwen3-1.7B"}  # a user's folders


# ---- finished runs that no printed command makes ----

EIGHT = "torchrun --nproc_per_node 8"
MADE = [
    f"{EIGHT} grpo.py --config configs/qwen3_1.7b_grpo.yaml --lora_rank 4 --output_dir runs/grpo",
    f"{EIGHT} grpo.py --config configs/qwen3_1.7b_grpo.yaml --lora_rank 4 --output_dir grpo",
    f"{EIGHT} sft.py --config configs/qwen3_1.7b_sft.yaml --output_dir runs/sft",
    f"{EIGHT} sft.py --config configs/qwen3_1.7b_sft.yaml --output_dir sft",
    f"{EIGHT} rm.py --config configs/qwen3_1.7b_rm.yaml --output_dir runs/rm",
    f"{EIGHT} rm.py --config configs/qwen3_1.7b_rm.yaml --output_dir rm",
    f"{EIGHT} eval.py --model Qwen/Qwen3-1.7B --dataset test.jsonl --max_new_tokens 1024 "
    "--template_kwargs enable_thinking=false --output_dir runs/base",
    f"{EIGHT} rm.py --config configs/tldr_rm.yaml --output_dir runs/tldr_gold",
    *(f"python eval.py --dataset test.jsonl --output_dir runs/{x}" for x in ("before", "after")),
    *(f"python grpo.py --seed {i} --output_dir runs/{name}{i}" for name in "ab" for i in range(3)),
    *(f"python grpo.py --output_dir runs/{name}" for name in "ab"),
    *(f"python sft.py --seed {i} --lr {lr} --output_dir runs/lr{lr}_{i}"
      for lr in ("0.003", "0.001") for i in range(2)),
]  # fmt: skip
# What a command reads and does not name.
READS = {
    "python course/lesson.py 6": ["runs/course/06/group"],
}
