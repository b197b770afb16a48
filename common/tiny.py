"""A model and a task that need no download: `--model tiny` and `--dataset arithmetic`.

`tiny` is a randomly initialised Qwen3 of about a million parameters with a character tokenizer; it trains in seconds
on a CPU core and goes through exactly the code that a large checkpoint goes through. `arithmetic` is two-number
addition and subtraction taught by a forgetful demonstrator, so that SFT, preference learning and RL each have something
to learn.
"""

import os
import random
import shutil
import string
import tempfile
from pathlib import Path

import torch

PAD, EOS, TURN, END_OF_TURN = "<|pad|>", "<|eos|>", "<|turn|>", "<|end_of_turn|>"
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
CONTEXT = 2048  # tokens
REVISION = 1  # part of the folder's name: raise it when anything below changes

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '<|end_of_turn|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


def tiny_model() -> str:
    """Folder of the `tiny` checkpoint, made on first use: the same weights on every machine and rank."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onefile"
    folder = cache / f"tiny-{REVISION}"
    if folder.exists():
        return str(folder)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=cache))
    except OSError as error:
        raise ValueError(f"--model tiny: cannot write {cache} ({error.strerror}); set XDG_CACHE_HOME") from error
    build_tokenizer().save_pretrained(work)
    build_model().save_pretrained(work)
    try:
        work.rename(folder)  # ranks may race: the first wins, all made the same bytes
    except OSError:
        shutil.rmtree(work)
    return str(folder)


def build_tokenizer():
    """One token per character; any other character becomes its UTF-8 bytes, so every text survives the round trip."""
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocabulary = [*CHARACTERS, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (PAD, EOS, TURN, END_OF_TURN)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        extra_special_tokens=[TURN, END_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model():
    """Qwen3 with 4 layers of width 128. head_dim 32 is the smallest that vLLM's CPU attention takes."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer()
    end_ids = [tokenizer.convert_tokens_to_ids(t) for t in (EOS, END_OF_TURN)]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=end_ids,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end_ids, pad_token_id=tokenizer.pad_token_id)
    return model


def arithmetic_rows(split: str) -> list[dict]:
    """Rows of the built-in task: `prompt`, `completion`, `answer`, `chosen`, `rejected`, all strings.

    `a+b=` and `a-b=` for 100 <= a < 500 and 4 <= b <= 9 where the hundreds stay as they are: 4,488 questions, of
    which `test` holds 500 and `train`, in four demonstrations each, the others. The demonstrator forgets to carry (or
    borrow) two times in three, and three questions in five need it: whoever imitates the `completion`s gets about 0.4
    of the `answer`s right, while every right answer stays well within reach of sampling. So SFT leaves room, and
    rewards fill it. `chosen` is the answer, `rejected` the forgetful one, or where nothing is carried an answer with
    one digit off.

    The same rows in the same order always. Raises `ValueError` for another split.
    """
    if split not in ("train", "test"):
        raise ValueError(f"the arithmetic task has no split {split!r}, only train and test")
    rng = random.Random(0)
    questions = [(a, op * b) for a in range(100, 500) for op in (1, -1) for b in range(4, 10)]
    questions = [(a, b) for a, b in questions if a // 100 == (a + b) // 100]
    rng.shuffle(questions)
    rows: dict[str, list[dict]] = dict(test=[], train=[])
    for number, (a, b) in enumerate(questions):
        answer, forgetful = str(a + b), str(a - a % 10 + (a + b) % 10)
        for _ in range(1 if number < 500 else 4):
            completion = forgetful if rng.random() < 2 / 3 else answer
            rejected = forgetful if forgetful != answer else _one_digit_off(answer, rng)
            row = dict(prompt=f"{a}{b:+}=", completion=completion, answer=answer, chosen=answer, rejected=rejected)
            rows["test" if number < 500 else "train"].append(row)
    rng.shuffle(rows["train"])
    return rows[split]


def _one_digit_off(number: str, rng: random.Random) -> str:
    i = rng.randrange(1, len(number))  # not the first: 0 there would be another kind of mistake
    return number[:i] + rng.choice([d for d in string.digits if d != number[i]]) + number[i + 1 :]
