"""Checkpoints are found, and errors name the missing or damaged file."""

import json
import shutil
import tempfile
from itertools import product
from pathlib import Path

import huggingface_hub
import pytest
import torch
from model.checkpoints import with_config
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from common.config.flags import Limit
from common.config.groups import TrainArgs
from common.durable import write_json
from common.model.hub import longest_sequence, require_same_tokenizer, resolve_model
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.text.encode import Encoder
from common.text.tokenizer import eos_token_ids, format_of, load_tokenizer


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/absent/folder", "no such folder"),
        (__file__, "no such folder"),
        ("absent/model", "no such folder, and the hub cannot be reached: Cannot find an appr"),
        ("absent/model@v1", "tokenizer files alone)"),
        ("a b", "not on the hub: Repo id must "),
    ],
)
def test_missing_model_is_refused_by_name(model, words, offline):
    with pytest.raises(ValueError) as error:
        resolve_model(model)
    assert str(error.value).startswith(f"--model {model}: ") and words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_revision_of_a_hub_model(offline, tmp_path, monkeypatch):
    """A branch or tag is a file in refs/ of the hub's cache, a commit a folder in snapshots/."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cache = tmp_path / "models--org--model"
    commits = dict(main="a" * 40, v1="b" * 40)
    for ref, commit in commits.items():
        shutil.copytree(tiny_model(), cache / "snapshots" / commit)
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / ref).write_text(commit)
    for name, commit in (("", "a"), ("@main", "a"), ("@v1", "b"), ("@" + "b" * 40, "b")):
        path = resolve_model(f"org/model{name}")
        assert path == str(cache / "snapshots" / (commit * 40))


def test_only_the_weights_of_the_index_are_downloaded(tmp_path, monkeypatch):
    """Mistral's repositories also have consolidated.safetensors, those of gpt-oss original/."""
    folder = shutil.copytree(tiny_model(), tmp_path / ("a" * 40))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "consolidated.safetensors").touch()
    index = dict(weight_map=dict(a="model-00001-of-00001.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    calls = []

    def download(repo_id, **options):
        calls.append((repo_id, options["revision"], options["allow_patterns"]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/model@v1") == str(folder)
    first, second, *_ = calls
    assert first[:2] == ("org/model", "v1") and not any("safetensors" in x for x in first[2])
    assert second == ("org/model", "a" * 40, ["model-00001-of-00001.safetensors"])
    calls.clear()
    resolve_model("org/model", weights=False)
    assert all(call == ("org/model", None, first[2]) for call in calls)


def sums(name: str) -> str:
    """Return checksums.json with this name, whose own checksum is right."""
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "x", {name: [1, 2]})
        return (Path(folder) / "x").read_text()


BROKEN = "the tokenizer cannot be loaded"
FP8 = '{"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}'
TEXT_FP8 = f'{{"model_type": "mistral3", "text_config": {FP8}}}'  # Ministral 3


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config.json", None, "the folder has no config.json"),
        ("tokenizer_config.json", None, "the folder has no tokenizer_config.json"),
        ("model.safetensors", None, "the folder has no model.safetensors"),
        ("model.safetensors.index.json", "[]", "model.safetensors.index.json: "),
        *(
            (
                "model.safetensors.index.json",
                json.dumps(dict(weight_map=dict(a=name))),
                f"model.safetensors.index.json: '{name}': outside of the folder",
            )
            for name in ("../model/model.safetensors", "/etc/passwd", "a/../../b.safetensors")
        ),
        (
            "config.json",
            '{"model_type": "qwen3", "eos_token_id": "x"}',
            "Field 'eos_token_id'",
        ),
        ("config.json", '{"model_type": "qwen3", "max_position_embeddings": "a"}', "expected int"),
        ("config.json", '{"model_type": "qwen3", "rope_parameters": "x"}', "expected "),
        ("checksums.json", sums("../outside.json"), "checksums.json is not as it was written"),
        ("checksums.json", sums("/etc/passwd"), "checksums.json is not as it was written"),
        ("config.json", "{oops", "config.json: "),
        ("config.json", "[]", "config.json: "),
        ("config.json", '{"model_type": "nonesuch"}', "config.json: "),
        ("config.json", FP8, "quantized"),
        ("config.json", TEXT_FP8, "quantized"),
        ("tokenizer.json", "[" * 100_000, BROKEN),
        ("tokenizer.json", "{}", BROKEN),
        ("tokenizer.json", None, BROKEN),
        ("tokenizer_config.json", "[]", BROKEN),
        (
            "tokenizer_config.json",
            '{"eos_token": "<|endoftext|>", "model_max_length": "x"}',
            "the tokenizer cannot be used: '>' not supported",
        ),
        ("tokenizer_config.json", "{}", "the tokenizer has no EOS token"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id ['x'] are no token ids"),
        ("generation_config.json", '{"eos_token_id": [1, true]}', "eos_token_id [1, True] are no"),
        ("generation_config.json", "[]", "generation_config.json: no JSON object"),
    ],
)
def test_damaged_model_folder_is_refused_by_name(file, text, words, tmp_path):
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    (folder / file).unlink(missing_ok=True)
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(ValueError) as error:
        load_tokenizer(resolve_model(str(folder)))
    assert str(error.value).startswith(f"--model {folder}: ") and words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("files", [("model", "shard"), ("a", "b")])
def test_weights_that_two_files_have_are_refused(files, tmp_path, device):
    """An index of old shards beside a new model.safetensors, which transformers would read; two
    files of an index with a weight of one name."""
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for file in files:
        save_file(weights, folder / f"{file}.safetensors", metadata=dict(format="pt"))
    shards = [f"{file}.safetensors" for file in files if file != "model"]
    named = dict.fromkeys(weights, shards[-1]) | {"another": shards[0]}
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=named)))
    words = "two sets of weights" if "model" in files else "another file has .* too"
    with pytest.raises(ValueError, match=f"^--model {folder}: .*{words}"):
        load_policy(resolve_model(str(folder)), TrainArgs(), device)


def test_hostile_values_in_a_config_are_one_line_or_harmless(tmp_path):
    """Nothing of the size that they name is allocated: the shapes of the weights are compared
    first."""
    folder = with_config(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    fields = [name for name in config if name != "transformers_version"]
    for field, value in product([*fields, None], (-4, 0, 10**12, 10**30, "x", [])):
        (folder / "config.json").write_text(json.dumps(config | {field: value} if field else value))
        try:
            load_policy(resolve_model(str(folder)), TrainArgs(), torch.device("meta"))
        except ValueError as error:
            text = str(error)
            assert text.startswith(f"--model {folder}: ") and "\n" not in text, (field, value)


def test_sizes_other_than_those_of_the_weights_are_refused_before_memory_is_taken(tmp_path, device):
    folder = with_config(tmp_path / "model", vocab_size=1 << 24, hidden_size=1 << 18)
    words = r"embed_tokens.weight: the files have .* the model needs \[16777216, 262144\]"
    with pytest.raises(ValueError, match=words):
        load_policy(resolve_model(str(folder)), TrainArgs(), device)


def test_reference_with_another_tokenizer_or_vocabulary_is_refused(tmp_path):
    tokenizer = load_tokenizer(tiny_model())
    require_same_tokenizer("--reference_model", tiny_model(), tokenizer)
    other = shutil.copytree(tiny_model(), tmp_path / "other")
    fields = json.loads((other / "tokenizer.json").read_text())
    ids = fields["model"]["vocab"]
    ids["é"] = ids.pop("0")
    (other / "tokenizer.json").write_text(json.dumps(fields))
    narrow = with_config(tmp_path / "narrow", vocab_size=9)
    for folder, words in ((other, "another tokenizer"), (narrow, "vocabulary of 9")):
        with pytest.raises(ValueError, match=f"--reference_model .*{words}"):
            require_same_tokenizer("--reference_model", str(folder), tokenizer)


def test_tokenizer_has_the_ids_of_its_file(tmp_path):
    """AutoTokenizer opens any tokenizer.json of a qwen2 model as Qwen2's, such as that of a
    distilled model."""
    folder = with_config(tmp_path / "model", model_type="qwen2")
    wrong = AutoTokenizer.from_pretrained(folder)
    ours, tiny = load_tokenizer(str(folder)), load_tokenizer(tiny_model())
    ids = [tokenizer("12+3=\né")["input_ids"] for tokenizer in (wrong, ours, tiny)]
    assert ids[0] != ids[1] == ids[2] and ours.chat_template == tiny.chat_template


def test_eos_ids_include_those_of_config_tokenizer_and_template(tmp_path):
    tokenizer = load_tokenizer(tiny_model())
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end_of_turn|>")]
    assert eos_token_ids(tiny_model(), tokenizer) == sorted(ends)
    folder = with_config(tmp_path / "model", eos_token_id=None)
    for listed, expected in ((7, [7, tokenizer.eos_token_id]), (None, [tokenizer.eos_token_id])):
        (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=listed)))
        assert eos_token_ids(str(folder), tokenizer, "plain") == expected
        with_template = sorted({*expected, *ends})
        assert eos_token_ids(str(folder), tokenizer) == with_template


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("eos", [10**18, -1, [3, -1]])
def test_eos_ids_that_the_model_lacks_are_refused(file, eos, tmp_path):
    folder = with_config(tmp_path / "model")
    fields = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(fields | dict(eos_token_id=eos)))
    words = (
        f"^--model {folder}: {file}: eos_token_id .* are no token ids of the model, which end at"
    )
    with pytest.raises(ValueError, match=words):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("pattern", [dict(String="a"), dict(Regex="a")])
def test_tokenizer_that_makes_a_long_text_of_a_short_one_is_refused(pattern, tmp_path):
    """Four characters would be 51,840,000."""
    folder = with_config(tmp_path / "model")
    fields = json.loads((folder / "tokenizer.json").read_text())
    longer = dict(type="Replace", pattern=pattern, content="a" * 60)
    several = dict(type="Sequence", normalizers=[longer, longer])
    for normalizer in (several | dict(normalizers=[several, several]), longer | dict(content="a")):
        fields["normalizer"] = normalizer
        (folder / "tokenizer.json").write_text(json.dumps(fields))
        if normalizer["type"] == "Replace":
            load_tokenizer(str(folder))
            continue
        words = f"^--model {folder}: tokenizer.json: its normalizer may make 12960000 characters of"
        with pytest.raises(ValueError, match=words):
            load_tokenizer(str(folder))


def test_texts_that_the_tokenizer_cannot_read_are_one_line(tmp_path):
    """Its library panics, which is no Exception."""
    folder = with_config(tmp_path / "model")
    fields = json.loads((folder / "tokenizer.json").read_text())
    pattern = dict(Regex="^(a+)+$|(?:(a|aa)+)+!")
    fields["pre_tokenizer"] = dict(type="Split", pattern=pattern, behavior="Isolated", invert=False)
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    encoder = Encoder(load_tokenizer(str(folder)), TrainArgs(prompt_format="plain"))
    with pytest.raises(ValueError) as error:
        encoder.prompt(dict(prompt="a" * 70 + "b", _source="rows:7"), ("prompt",))
    assert str(error.value).startswith(f"rows:7: {folder}/tokenizer.json cannot read 'aaaaaa")
    assert "retry-limit-in-match over" in str(error.value) and "\n" not in str(error.value)


def test_longest_sequence_is_the_smaller_of_context_and_pack():
    context = Limit(2048, "the model's context of 2048 tokens")
    assert longest_sequence(tiny_model(), TrainArgs()) == context
    # The first token is never predicted.
    pack = Limit(101, "--pack_tokens 100")
    assert longest_sequence(tiny_model(), TrainArgs(pack_tokens=100)) == pack
    assert longest_sequence(tiny_model(), TrainArgs(pack_tokens=200), sequences=2) == (
        101,
        "--pack_tokens 200",
    )


# ---- the format of prompts ----


def test_chat_models_get_their_template_and_others_do_not(tmp_path, capsys):
    """A chat model's own EOS tokens include the one that ends a turn in its template."""
    tokenizer = load_tokenizer(tiny_model())
    eos, end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end_of_turn|>")
    folder = with_config(tmp_path / "model", eos_token_id=eos)
    both, line = [eos, end], "--prompt_format chat: a chat"
    warning = "warning: --prompt_format plain: a chat"
    for generation, given, expected, said in (
        (dict(eos_token_id=both), "auto", "chat", line),
        (dict(eos_token_id=both), "plain", "plain", warning),
        (dict(eos_token_id=both, prompt_format="auto"), "auto", "auto", ""),  # an export of a run
        (dict(eos_token_id=both, prompt_format="chat"), "auto", "chat", line),
        (dict(eos_token_id=eos), "auto", "auto", ""),
        (dict(eos_token_id=eos), "chat", "chat", ""),
    ):
        (folder / "generation_config.json").write_text(json.dumps(generation))
        args = TrainArgs(prompt_format=given)
        found = format_of(load_tokenizer(str(folder), args), args)
        out = capsys.readouterr().out
        assert found == expected and out.startswith(said) and bool(out) == bool(said)
    row = dict(prompt="a", _source="x")
    encoder = Encoder(tokenizer, TrainArgs(prompt_format="chat"))
    ids = encoder.prompt(row, ("prompt",))
    assert tokenizer.decode(ids) == "<|turn|>user\na<|end_of_turn|>\n<|turn|>assistant\n"


def test_small_models_compute_with_one_thread_unless_the_user_says_otherwise(device, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", False)
    for variables, threads in (({}, 1), (dict(OMP_NUM_THREADS="3"), 3)):
        torch.set_num_threads(3)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        load_policy(tiny_model(), TrainArgs(dtype="float32"), device)
        if device.type == "cpu":
            assert torch.get_num_threads() == threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("flag", ["--model", "--teacher"])
def test_an_adapter_for_a_model_is_refused_with_its_base(flag, tmp_path):
    config = json.dumps(dict(peft_type="LORA", base_model_name_or_path="org/base"))
    for name in ("adapter", "hf"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(config)
    folder = tmp_path / "adapter"
    with pytest.raises(ValueError) as error:
        resolve_model(str(folder), flag)
    advice = f"name the merged model, {tmp_path}/hf"
    if flag == "--model":
        advice = f"train it on with --model org/base --adapter {folder}, or {advice}"
    assert str(error.value) == f"{flag} {folder}: an adapter of org/base, not a model; {advice}"


def test_the_folder_of_a_run_is_refused_with_the_name_of_its_model(tmp_path):
    shutil.copytree(tiny_model(), tmp_path / "run/hf")
    words = f"the folder has no config.json; name the model in it, {tmp_path}/run/hf$"
    with pytest.raises(ValueError, match=words):
        resolve_model(str(tmp_path / "run"))
