"""The files of an export are those of its base, except for what the run changed and for names of
transformers 5."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import tiny_tokenizer
from transformers import AutoConfig, AutoTokenizer, Gemma3TextConfig, LlamaConfig, Qwen3MoeConfig

from common.model.loading import base_dtype
from common.model.tiny import tiny_model
from common.text.chat import use_template
from common.text.tokenizer import load_tokenizer
from common.train.export_files import config_file, fields_of_transformers_4, tokenizer_files

CHAT_TEMPLATE = tiny_tokenizer().chat_template
OTHER_TEMPLATE = CHAT_TEMPLATE.replace("|turn|", "|pad|")


@pytest.fixture
def base(tmp_path) -> Path:
    """Return `tiny` in the form of transformers 4: compact JSON, other files of a tokenizer, the
    template in tokenizer_config.json, and files that belong to no export."""
    folder = shutil.copytree(tiny_model(), tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    change(
        folder, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast",
        chat_template=CHAT_TEMPLATE, extra_special_tokens=None,
        additional_special_tokens=["<|turn|>", "<|end_of_turn|>"],
    )  # fmt: skip
    config = dict(rope_parameters=None, rope_theta=5e5, dtype=None, torch_dtype="float32")
    change(folder, "config.json", **config)
    (folder / "special_tokens_map.json").write_text(
        '{"eos_token": {"content": "<|eos|>"}, "pad_token": "<|pad|>"}'
    )
    for name in "merges.txt vocab.json added_tokens.json tokenizer.model qwen.tiktoken".split():
        (folder / name).write_text("{}\n")
    for name in ("README.md", "modeling_tiny.py", "pytorch_model.bin"):
        (folder / name).touch()
    return folder


def change(folder: Path, name: str, **fields) -> None:
    """Change fields of a JSON file, or remove those that become None."""
    content = json.loads((folder / name).read_text()) | fields
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / name).write_text(json.dumps(kept))


def export(base: Path, tokenizer=None) -> dict[str, bytes]:
    return tokenizer_files(str(base), tokenizer or load_tokenizer(str(base)), "auto")


def written(files: dict[str, bytes], base: Path) -> Path:
    """Return a folder with the files and the base's config."""
    folder = base.with_name("written")
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(content)
    shutil.copy(base / "config.json", folder)
    return folder


# ---- tokenizer ----


def test_tokenizer_files_keep_their_bytes(base):
    files = export(base)
    assert files.keys() == {
        "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
        "added_tokens.json", "merges.txt", "vocab.json", "qwen.tiktoken",
    }  # fmt: skip
    for name, content in files.items():
        assert content == (base / name).read_bytes(), name


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "both", ""])
def test_another_template_is_written_where_the_base_has_its_own(place, base, tmp_path):
    """A file takes precedence; with it, templates for other purposes go."""
    more = "additional_chat_templates/rag.jinja"
    has_file = place in ("chat_template.jinja", "both")
    if has_file:
        (base / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        (base / more).parent.mkdir()
        (base / more).write_text("other")
    if place in ("chat_template.jinja", ""):
        change(base, "tokenizer_config.json", chat_template=None)
    before = export(base)
    assert before["tokenizer_config.json"] == (base / "tokenizer_config.json").read_bytes()
    assert (more in before) == has_file
    tokenizer = load_tokenizer(str(base))
    (tmp_path / "other.jinja").write_text(OTHER_TEMPLATE)
    use_template(tokenizer, str(tmp_path / "other.jinja"))
    files = export(base, tokenizer)
    found = json.loads(files["tokenizer_config.json"]).get("chat_template")
    assert found == (None if has_file else OTHER_TEMPLATE)
    assert files.get("chat_template.jinja") == (OTHER_TEMPLATE.encode() if has_file else None)
    assert AutoTokenizer.from_pretrained(written(files, base)).chat_template == OTHER_TEMPLATE
    changed = {name for name in before if files.get(name) != before[name]}
    assert changed <= {"tokenizer_config.json", "chat_template.jinja", more}


def test_new_eos_is_written_to_both_files(base):
    for name in ("config.json", "generation_config.json"):
        change(base, name, eos_token_id=load_tokenizer(str(base)).eos_token_id)
    files = export(base)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        assert json.loads(files[name])["eos_token"] == "<|end_of_turn|>"
    assert AutoTokenizer.from_pretrained(written(files, base)).eos_token == "<|end_of_turn|>"


def test_names_of_transformers_5_are_replaced():
    """`tiny` is in the form of transformers 5."""
    before = json.loads(Path(tiny_model(), "tokenizer_config.json").read_text())
    assert before["tokenizer_class"] == "TokenizersBackend" and "extra_special_tokens" in before
    files = export(Path(tiny_model()))
    after = json.loads(files["tokenizer_config.json"])
    assert after.pop("tokenizer_class") == "PreTrainedTokenizerFast"
    assert after.pop("additional_special_tokens") == before.pop("extra_special_tokens")
    assert after.items() < before.items()
    assert "chat_template.jinja" in files


def test_class_with_other_ids_than_the_file_is_replaced(base):
    """`LlamaTokenizer` of transformers 5 ignores how tokenizer.json cuts a text."""
    change(base, "config.json", model_type="llama")
    change(base, "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    wrong, right = AutoTokenizer.from_pretrained(base), load_tokenizer(str(base))
    again = AutoTokenizer.from_pretrained(written(export(base), base))
    ids = [tokenizer("12+3=\né")["input_ids"] for tokenizer in (wrong, right, again)]
    assert ids[0] != ids[1] == ids[2]
    assert again("a").keys() == wrong("a").keys()


def test_files_of_python_are_not_exported_nor_named(base):
    for name in ("tokenizer_config.json", "preprocessor_config.json"):
        (base / name).touch()
        text = (base / name).read_text() or "{}"
        (base / name).write_text(text)
        change(base, name, auto_map=dict(AutoTokenizer=["evil.Tokenizer", None]), kept=1)
    (base / "tokenizer_evil.py").write_text("")
    files = export(base)
    assert "tokenizer_evil.py" not in files
    for name in ("tokenizer_config.json", "preprocessor_config.json"):
        fields = json.loads(files[name])
        assert "auto_map" not in fields and fields["kept"] == 1


# ---- config.json ----


def test_config_in_the_form_of_transformers_4_stays(base):
    change(base, "config.json", auto_map=dict(AutoConfig="modeling_tiny.Config"))
    before = json.loads((base / "config.json").read_text())
    del before["auto_map"]
    content = config_file(str(base), torch.bfloat16, dict(scored_at="end"))
    assert json.loads(content) == before | dict(
        dtype="bfloat16", torch_dtype="bfloat16", scored_at="end"
    )


LINEAR = dict(rope_type="linear", factor=2.0)
LOCAL = dict(rope_theta=2e6, rope_local_base_freq=3e4, rope_scaling=LINEAR)
NEOX = dict(rotary_pct=0.5, rotary_emb_base=2e4)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (LlamaConfig(rope_parameters=LINEAR | dict(rope_theta=1e5)),
         dict(rope_theta=1e5, rope_scaling=LINEAR)),
        (Gemma3TextConfig(**LOCAL), LOCAL),
        (AutoConfig.for_model("gpt_neox", **NEOX),
         NEOX | dict(rope_theta=2e4, rope_scaling=None, partial_rotary_factor=0.5)),
        (Qwen3MoeConfig(num_experts=5), dict(rope_theta=1e4, rope_scaling=None, num_experts=5)),
    ],
)  # fmt: skip
def test_fields_have_their_names_of_transformers_4(config, fields, tmp_path):
    """A config with both forms is the same config."""
    assert fields_of_transformers_4(config) == fields
    config.save_pretrained(tmp_path)
    content = config_file(str(tmp_path), torch.float32, {})
    assert fields.items() <= json.loads(content).items()
    (tmp_path / "config.json").write_bytes(content)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == config.rope_parameters
    assert fields_of_transformers_4(again) == fields


def test_dtype_of_a_base_is_that_of_its_config(base):
    change(base, "config.json", torch_dtype="bfloat16")
    assert base_dtype(str(base)) == torch.bfloat16
    change(base, "config.json", torch_dtype=None)
    assert base_dtype(str(base)) == torch.float32
