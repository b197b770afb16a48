"""Built-in models, Qwen3s of a million parameters with a character tokenizer. `--model tiny` has
random weights. `--model tiny-sft` is `tiny` after sft.py on the task `arithmetic`, of which it
solves 0.4: a start for RL.

They need no download, train in seconds on a CPU core, and use the same code as a large checkpoint.
The built-in tasks (common/data/tasks.py) are data for them. `python tools/make_tiny_sft.py` makes
the weights of tiny-sft."""

import contextlib
import os
import string
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

PAD = "<|pad|>"
EOS = "<|eos|>"
TURN = "<|turn|>"
END_OF_TURN = "<|end_of_turn|>"
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
CONTEXT = 2048  # tokens
REVISION = 2  # part of the folder's name; raise it when anything below changes
SFT_WEIGHTS = Path(__file__).with_name("tiny_sft.safetensors")  # bfloat16

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '<|end_of_turn|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


def tiny_model(name: str = "tiny") -> str:
    """Return the folder of `tiny` or `tiny-sft`, with the same weights everywhere."""
    return cached_folder(
        f"{name}-{REVISION}", f"--model {name}", lambda folder: _write(name, folder)
    )


def cached_folder(name: str, flag: str, write: Callable[[Path], None]) -> str:
    """Return a folder for models that are made on this machine. `write` makes its files on first
    use. Raises `ValueError` naming `flag` if the disk refuses them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onefile"
    folder = cache / name
    if folder.exists():
        return str(folder)

    def refusal(problem: str) -> ValueError:
        return ValueError(f"{flag}: cannot write {cache} ({problem}); set XDG_CACHE_HOME")

    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=cache)
    except OSError as error:
        raise refusal(error.strerror) from error
    with temporary as work:
        try:
            write(Path(work))
        except OSError as error:
            raise refusal(error.strerror) from error
        # The first of several ranks wins; all make the same bytes.
        with contextlib.suppress(OSError):
            Path(work).rename(folder)
    return str(folder)


def _write(name: str, folder: Path) -> None:
    """Write the tokenizer and the model of a name."""
    build_tokenizer().save_pretrained(folder)
    model = build_model()
    if name == "tiny-sft":
        from safetensors.torch import load_file

        model.load_state_dict(load_file(SFT_WEIGHTS), strict=False)  # without the tied head
        model.generation_config.prompt_format = "plain"
    save(model, folder)


def save(model, folder: Path) -> None:
    """Write the model as `save_pretrained` does, but on every rank: that writes nothing on ranks
    other than 0."""
    from safetensors.torch import save_file

    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = model.state_dict()
    del weights["lm_head.weight"]  # tied
    save_file(weights, folder / "model.safetensors", dict(format="pt"))


def build_tokenizer():
    """Return a tokenizer with one token per character. Characters outside of its vocabulary become
    UTF-8 bytes, so that decoding restores every text."""
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    vocabulary = [*CHARACTERS, *(f"<0x{byte:02X}>" for byte in range(256))]
    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = (PAD, EOS, TURN, END_OF_TURN)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        extra_special_tokens=[TURN, END_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


LANGUAGE_MODEL = dict(
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # the minimum of vLLM's CPU attention
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
    bos_token_id=None,
)


def build_model():
    """Return a Qwen3 with 4 layers of width 128."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer()
    end_ids = [tokenizer.convert_tokens_to_ids(t) for t in (EOS, END_OF_TURN)]
    config = Qwen3Config(
        **LANGUAGE_MODEL,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=end_ids,
        dtype="float32",
    )
    return random_model(Qwen3ForCausalLM, config, end_ids, tokenizer.pad_token_id)


def random_model(model_class, config, end_ids: list[int], pad_id: int):
    """Return a model with random weights, the same everywhere."""
    from transformers import GenerationConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
    model.generation_config = GenerationConfig(
        eos_token_id=end_ids, pad_token_id=pad_id, prompt_format="auto"
    )
    return model
