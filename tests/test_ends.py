"""Completions of a base model end, although its chat template ends turns with another token than
EOS."""

import json
import shutil

import pytest
import torch
from helpers import metrics, tiny_tokenizer, write_rows

from common.model.tiny import tiny_model
from common.rollout.engine import Engine
from common.text.tokenizer import load_tokenizer
from common.train.export_files import generation_file, tokenizer_files
from grpo import Args

EOS, EOT = "<|eos|>", "<|end_of_turn|>"


@pytest.fixture
def base(tmp_path):
    """Return `tiny` in the form of base models: none of its configs lists the token with which the
    template ends a turn."""
    folder = tmp_path / "base"
    shutil.copytree(tiny_model(), folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(
            json.dumps(config | dict(eos_token_id=min(config["eos_token_id"])))
        )
    return folder


@pytest.mark.slow
def test_completions_end_after_training_on_chats(main, base, tmp_path):
    """After sft.py they must end in grpo.py, in eval.py and in transformers' `model.generate`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chats = [
        [dict(role="user", content=f"{i}+1="), dict(role="assistant", content=str(i + 1))]
        for i in range(64)
    ]
    for name, rows in (
        ("chats", [dict(messages=chat) for chat in chats]),
        ("prompts", [dict(prompt=chat[:1], answer=chat[1]["content"]) for chat in chats[:8]]),
    ):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    main(
        "sft", "--model", base, "--dataset", tmp_path / "chats.jsonl",
        "--output_dir", tmp_path / "sft", "--max_steps", 40, "--batch_size", 8, "--lr", 2e-3,
        "--eval_every", 0,
    )  # fmt: skip
    sampling = ("--dataset", tmp_path / "prompts.jsonl", "--max_new_tokens", 16)
    sampling += ("--engine", "transformers")
    # the configs of the base model, and weights trained to end a turn
    trained = shutil.copytree(base, tmp_path / "trained")
    shutil.copy(tmp_path / "sft" / "hf" / "model.safetensors", trained)
    main("grpo", "--model", trained, *sampling, "--output_dir", tmp_path / "grpo", "--max_steps", 1,
         "--prompts_per_step", 8, "--samples_per_prompt", 4, "--eval_every", 0)  # fmt: skip
    assert metrics(tmp_path / "grpo")[0]["completions/clipped_ratio"] <= 0.1
    main("eval", "--model", tmp_path / "grpo" / "hf", *sampling, "--output_dir", tmp_path / "eval")
    results = json.loads((tmp_path / "eval" / "results.json").read_text())
    assert results["overall"]["truncated"]["mean"] <= 0.1

    for folder in (tmp_path / "sft" / "hf", tmp_path / "grpo" / "hf"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.eos_token == EOT
        ids = tokenizer.apply_chat_template(
            chats[0][:1], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=16)
        assert tokenizer.decode(out[0, -1]) == EOT


def test_export_ends_completions_like_training(base, tmp_path):
    (base / "generation_config.json").write_text(json.dumps(dict(eos_token_id=7, top_k=20)))
    tokenizer = load_tokenizer(str(base))
    eos, eot = tokenizer.convert_tokens_to_ids([EOS, EOT])
    for prompt_format, ends, token in (("auto", [7, eos, eot], EOT), ("plain", [7, eos], EOS)):
        folder = tmp_path / prompt_format
        write_ends(str(base), tokenizer, prompt_format, folder)
        assert json.loads((folder / "generation_config.json").read_text()) == dict(
            eos_token_id=ends, top_k=20, prompt_format=prompt_format
        )
        assert load_eos(folder) == token and tokenizer.eos_token == EOS
    write_ends(tiny_model(), tokenizer, "auto", tmp_path / "tiny")  # its configs list the token
    assert load_eos(tmp_path / "tiny") == EOS


def write_ends(path: str, tokenizer, prompt_format: str, folder) -> None:
    """Write generation config and tokenizer of an export."""
    folder.mkdir()
    (folder / "generation_config.json").write_bytes(generation_file(path, tokenizer, prompt_format))
    for name, content in tokenizer_files(path, tokenizer, prompt_format).items():
        (folder / name).write_bytes(content)


def load_eos(folder) -> str:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).eos_token


def test_text_has_all_tokens_but_ends_and_padding(device):
    """Many ChatML tokenizers have an end token that is not special. In the text a reward would find
    it after the answer. Others have special tokens for tags, which a reward must find."""
    from tokenizers import AddedToken

    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=False, normalized=False)])
    tokenizer.add_tokens([AddedToken("<answer>", special=True), AddedToken("<bos>", special=True)])
    tokenizer.bos_token = "<bos>"
    end, seven, tag = tokenizer.convert_tokens_to_ids(["<|im_end|>", "7", "<answer>"])

    class Silent(Engine):
        def _start(self):
            pass

    args = Args(stop_token_ids=(end, seven))
    engine = Silent(tiny_model(), args, tokenizer, device, trained=False)

    def text(*last: int) -> str:
        return engine.text_of([tokenizer.convert_tokens_to_ids("6"), *last])

    assert text(end) == "6"
    assert text(seven) == "67"  # a character stays in the text although it is an EOS
    assert text(tag, seven) == text(tag, seven, end) == "6<answer>7"
    assert text(tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == "6"
