"""Small models with random weights, samples for them, and what plain transformers computes."""

import json
import shutil
from pathlib import Path

import torch
import transformers
from helpers import tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from common.config.groups import TrainArgs
from common.model.tiny import tiny_model
from common.packs.sample import Completion, Sample

ARGS = TrainArgs(dtype="float32")
WINDOW = 7
# Two are equal, so that attention computes them as one batch; most exceed the window.
LENGTHS = (18, 41, 41, 6, 64, 2)


def small(**extra) -> dict:
    return dict(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ) | extra  # fmt: skip


LLAMA3_ROPE = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32, rope_theta=10000.0,
)  # fmt: skip
EXPERTS = dict(head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)
WINDOWED = dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
ARCHITECTURES = dict(
    qwen3=lambda: transformers.Qwen3Config(**small(head_dim=16, tie_word_embeddings=True)),
    llama=lambda: transformers.LlamaConfig(**small(rope_parameters=LLAMA3_ROPE)),
    mistral=lambda: transformers.MistralConfig(**small(sliding_window=WINDOW)),
    qwen2=lambda: transformers.Qwen2Config(**small(attention_dropout=0.5, **WINDOWED)),
    gemma3=lambda: transformers.Gemma3TextConfig(**small(head_dim=16, sliding_window=WINDOW)),
    qwen3_moe=lambda: transformers.Qwen3MoeConfig(**small(**EXPERTS)),
)


def write_checkpoint(config, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    """Write a model with random weights, also in norms and biases, which are 1 and 0 in a new
    model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def hf_model(path: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def samples(lengths=LENGTHS, vocabulary: int = 97) -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    return [Sample(ids=i, loss_mask=[(t + len(i)) % 3 != 0 for t in range(len(i))]) for i in ids]


def separate(model, sample: Sample, temperature: float):
    """Return `(logprobs, entropy, correct)` of one sequence by the plain model."""
    logits = model(torch.tensor([sample.ids[:-1]]), use_cache=False).logits[0].double()
    logits = logits / temperature
    logp, targets = logits.log_softmax(-1), torch.tensor(sample.ids[1:])
    logprobs = logp.gather(-1, targets[:, None])[:, 0]
    return logprobs, -(logp.exp() * logp).sum(-1), logits.argmax(-1) == targets


def with_config(folder: Path, **fields) -> Path:
    """Return a copy of `tiny` with other fields in its config."""
    shutil.copytree(tiny_model(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def opens_whole(folder: Path) -> torch.nn.Module:
    """Return the model of an export, whose files must have exactly the weights of its class."""
    model, info = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return model


# ---- reward models ----

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}"
    "{% endfor %}"
)


def save_classifier(folder, template: str | None = TEMPLATE, context: int = 256):
    """Save a Llama with another vocabulary: bytes, some of them merged."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "th", "in", "an"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("i", "n"), ("a", "n")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=context, num_labels=1,
        pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = LlamaForSequenceClassification(config)
        torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(folder)
    return folder


def sampled(tokenizer, row: dict, prompt: str, text: str, finish: str = "stop") -> Completion:
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = prompt_ids + tokenizer(text, add_special_tokens=False)["input_ids"]
    ids += [tokenizer.eos_token_id] * (finish == "stop")
    size = len(prompt_ids)
    mask = [i >= size for i in range(len(ids))]
    return Completion(ids, mask, prompt_length=size, text=text, finish_reason=finish, row=row)
