"""Make the folders of the built-in models again: `python tools/make_tiny.py NAME...`.

- `tiny`: a Qwen3 with 4 layers of width 128, random weights, and a token for each character.
- `tiny-sft`: `tiny` after sft.py with configs/demo_sft.yaml, a minute on a CPU core. Its file has
  bfloat16, half of the bytes, and records the command and its losses. On another machine the
  weights differ slightly, because sums are rounded in another order.
- `tiny-images`: an Idefics3 with random weights and the tokenizer of `tiny`. It scales a picture to
  32 x 32 pixels, which are 64 patches. Each 2 x 2 patches become one token. On pictures of the task
  `squares` (extras/images/pictures.py) a token is a cell, with one square or none."""

import json
import string
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.metrics.curves import read_metrics

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "tiny": ROOT / "common/model/built_in/tiny",
    "tiny-sft": ROOT / "common/model/built_in/tiny-sft",
    "tiny-images": ROOT / "extras/images/tiny-images",
}
SFT = ("sft.py", "--config", "configs/demo_sft.yaml")
PAD, EOS, TURN, END_OF_TURN = SPECIAL = ("<|pad|>", "<|eos|>", "<|turn|>", "<|end_of_turn|>")
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '<|end_of_turn|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
LANGUAGE_MODEL = dict(
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # the minimum of vLLM's CPU attention
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    bos_token_id=None,
)
IMAGE = "<image>"
AROUND_IMAGES = ("<fake_token_around_image>", "<global-img>")
CONTENT = (
    "{%- if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif -%}"
)
SIZE = 32  # pixels of a picture, in both directions


def write(name: str, folder: Path) -> None:
    """Write the tokenizer and the model of this name."""
    tokenizer = build_tokenizer() if name != "tiny-images" else build_image_tokenizer()
    tokenizer.save_pretrained(folder)
    model = build_model(tokenizer) if name != "tiny-images" else build_image_model(tokenizer)
    if name == "tiny-sft":
        model.generation_config.prompt_format = "plain"
    model.save_pretrained(folder)
    if name == "tiny-sft":
        train(folder / "model.safetensors")
    if name == "tiny-images":
        processor = dict(
            image_processor_type="Idefics3ImageProcessor",
            size=dict(longest_edge=SIZE),
            max_image_size=dict(longest_edge=SIZE),
            do_image_splitting=False,
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        )
        (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))


def train(file: Path) -> None:
    """Replace the weights of `tiny` in `file` by those after training."""
    with tempfile.TemporaryDirectory() as run:
        subprocess.run([sys.executable, *SFT, "--output_dir", run], cwd=ROOT, check=True)
        weights = load_file(Path(run, "hf", "model.safetensors"))
        lines = read_metrics(Path(run, "metrics.jsonl"))
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    metadata = dict(format="pt", command=" ".join(SFT), losses=json.dumps(losses))
    save_file({name: x.to(torch.bfloat16) for name, x in weights.items()}, file, metadata)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character. Characters outside of its vocabulary become
    UTF-8 bytes, so that decoding restores every text."""
    vocabulary = [*CHARACTERS, *(f"<0x{byte:02X}>" for byte in range(256))]
    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        extra_special_tokens=[TURN, END_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=LANGUAGE_MODEL["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    ends = ends_of(tokenizer)
    config = Qwen3Config(**LANGUAGE_MODEL, **ends, vocab_size=len(tokenizer), dtype="float32")
    return random_model(Qwen3ForCausalLM, config, ends)


def build_image_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of `tiny` with tokens of images; its chat template takes parts, too."""
    tokenizer = build_tokenizer()
    special = dict(extra_special_tokens=[*AROUND_IMAGES, IMAGE])
    tokenizer.add_special_tokens(special, replace_extra_special_tokens=False)
    before, behind = CHAT_TEMPLATE.split(" + message['content'] + ")
    tokenizer.chat_template = f"{before} }}}}{CONTENT}{{{{ {behind}"
    return tokenizer


def build_image_model(tokenizer: PreTrainedTokenizerFast) -> Idefics3ForConditionalGeneration:
    """Return a vision tower with 2 layers of width 64 and a language model with 4 of width 128.
    Initial weights are larger than usual: with them a small model learns to count sooner."""
    ends = ends_of(tokenizer)
    vision = dict(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIZE,
        patch_size=4,
        initializer_range=0.06,
    )
    text = dict(model_type="llama", vocab_size=len(tokenizer), initializer_range=0.06)
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        scale_factor=2,  # 2 x 2 patches are one token
        tie_word_embeddings=True,
        vision_config=vision,
        text_config=LANGUAGE_MODEL | text | ends,
        dtype="float32",
        pad_token_id=tokenizer.pad_token_id,
    )
    config.eos_token_id = ends["eos_token_id"]
    return random_model(Idefics3ForConditionalGeneration, config, ends)


def ends_of(tokenizer: PreTrainedTokenizerFast) -> dict:
    end_ids = tokenizer.convert_tokens_to_ids([EOS, END_OF_TURN])
    return dict(eos_token_id=end_ids, pad_token_id=tokenizer.pad_token_id)


def random_model(model_class, config, ends: dict):
    torch.manual_seed(0)
    model = model_class(config)
    model.generation_config = GenerationConfig(**ends, prompt_format="auto")
    return model


if __name__ == "__main__":
    for name in sys.argv[1:] or FOLDERS:
        write(name, FOLDERS[name])
