"""Checkpoints of images and text: the language model is trained, all other parts stay.
test_coverage.py compares the numbers with transformers' own class; this file tests files, names and
runs."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import assert_close_metrics, assert_resumes_exactly, metrics, stored, tiny_tokenizer
from model.checkpoints import opens_whole
from processes import run
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForSequenceClassification

from bench.models import ARCHITECTURES, ARGS, QWEN_VISION, ROPE, checkpoint, rows, with_images
from common.config.groups import TrainArgs
from common.model.loading import open_model, whole
from common.model.policy import load_policy, load_scalar_model
from common.packs.packing import pack
from common.packs.sample import Sample
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import export_hf

QUICK = ("gemma3", "qwen3_vl")
STEPS = ("--max_steps", 2, "--batch_size", 4, "--lr", 1e-2, "--eval_every", 0, "--save_every", 1,
         "--lr_schedule", "constant", "--dtype", "float32")  # fmt: skip


@pytest.fixture(scope="module", params=[*QUICK, pytest.param("mistral3", marks=pytest.mark.slow)])
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(family, tmp_path_factory) -> str:
    return checkpoint(family, tmp_path_factory.mktemp(family), file_size="200KB")


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def is_of_text(name: str) -> bool:
    return re.search("vision|visual|projector|connector", name) is None


@torch.no_grad()
def logits(model, ids: list[int]) -> torch.Tensor:
    ids_1T = torch.tensor([ids])
    return model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T)).logits[0]


@torch.no_grad()
def logprobs(path: str, device, ids: list[int]) -> torch.Tensor:
    policy = load_policy(path, replace(ARGS, share_prefix=0), device)
    (mb,) = pack([Sample(ids, [True] * len(ids))], 100, device)
    return policy(mb)[0]


def require_numbers_of(model: torch.nn.Module, path: str, device) -> None:
    """Check that the policy in `path` has the log-probs of transformers' model."""
    ids = rows()[1]
    logp_TV = logits(model, ids)[:-1].log_softmax(-1)
    expected_T = logp_TV.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(logprobs(path, device, ids).cpu(), expected_T, atol=2e-5, rtol=0)


# ---- exports and runs ----


@pytest.fixture(scope="module")
def exported(family, path, device, tmp_path_factory) -> Path:
    """Return the export of a policy of which all weights have changed."""
    folder = tmp_path_factory.mktemp(f"{family}_export") / "hf"
    policy = load_policy(path, ARGS, device)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)
    export_hf(policy, load_tokenizer(path), folder)
    return folder


def test_export_changes_the_language_model_alone(path, exported, device):
    require_changed_text_alone(path, exported, device)


def require_changed_text_alone(path, hf: Path, device) -> None:
    """An export opens with the class of its base. All other parts have the bits of the base, and
    the text has the numbers of training."""
    before, after = stored(path), stored(hf)
    assert before.keys() == after.keys()
    text = {name for name in before if is_of_text(name)}
    assert 0 < len(text) < len(before)
    for name in before:
        if name not in text:
            assert torch.equal(before[name], after[name]), name
    changed = {name for name in text if not torch.equal(before[name], after[name])}
    assert len(changed) > 0.8 * len(text), text - changed
    require_numbers_of(opens_whole(hf), str(hf), device)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3"], indirect=True)
def test_run_changes_the_text_alone_resumes_and_does_not_depend_on_ranks(
    path, main, sums, device, tmp_path
):
    flags = (*STEPS, "--model", path, "--dataset", sums, "--keep_last", 2)
    one = tmp_path / "one"
    main("sft", *flags, "--output_dir", one)
    require_changed_text_alone(path, one / "hf", device)
    assert_resumes_exactly(main, "sft", *flags, folder=one, finished=2)
    run(2, "sft.py", *flags, "--output_dir", tmp_path / "two")
    assert_close_metrics(one, tmp_path / "two", ("loss", "grad_norm", "entropy"), rel=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_adapters_have_the_names_of_the_whole_model(path, main, sums, device, tmp_path):
    """PEFT would give adapters to exactly these layers of transformers' own class. The export opens
    with that class; other weights have the bits of the base."""
    flags = (*STEPS, "--model", path, "--dataset", sums, "--lora_rank", 2)
    main("sft", *flags, "--output_dir", tmp_path)
    before, after = stored(path), stored(tmp_path / "hf")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(is_of_text(name) and before[name].ndim == 2 for name in changed)
    opens_whole(tmp_path / "hf")

    modules = dict(open_model(path, torch.float32).named_modules())
    layers = set()
    for key, weight in load_file(tmp_path / "adapter" / "adapter_model.safetensors").items():
        name, _, kind = key.removeprefix("base_model.model.").rpartition(".lora_")
        layers.add(name)
        sizes = dict(A=modules[name].in_features, B=modules[name].out_features)
        assert weight.shape["AB".index(kind[0]) - 1] == sizes[kind[0]]
    targets = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["target_modules"]
    if isinstance(targets, str):
        matched = {name for name in modules if re.fullmatch(targets, name)}
    else:
        matched = {n for n in modules if any(f".{n}".endswith(f".{t}") for t in targets)}
    assert matched == layers and all(map(is_of_text, layers))
    args = TrainArgs(dtype="float32", adapter=str(tmp_path / "adapter"))
    again = load_policy(path, args, device).hf.state_dict()
    assert all(whole(x).any() for name, x in again.items() if name.endswith("lora_B"))


# ---- reward models and value models ----


@pytest.fixture(scope="module")
def gemma(device, tmp_path_factory) -> str:
    """A tied model."""
    return checkpoint("gemma3", tmp_path_factory.mktemp("gemma"), file_size="200KB")


@pytest.mark.slow
def test_classifier_of_each_family_opens_or_is_refused(path, tmp_path, device):
    try:
        model = load_scalar_model(path, ARGS, device)
    except ValueError as error:
        assert "transformers has no sequence classifier of" in str(error)
        return
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    export_hf(model, load_tokenizer(path), tmp_path / "hf")
    opened, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    ids = [3, 17, 40, 8]
    (mb,) = pack([Sample([*ids, 2], [True] * 5)], 100, device)
    with torch.no_grad():
        score = model(mb)[-1].cpu()
        expected = opened(input_ids=torch.tensor([ids])).logits[0, 0]
    torch.testing.assert_close(score, expected, atol=1e-5, rtol=1e-5)


# ---- rules that rows of weights cannot follow ----

LOAD = """
import sys
from bench.models import ARGS
from common.model.policy import load_policy
from common.parallel import distributed
device, _, _ = distributed.setup(0)
load_policy(sys.argv[1], ARGS, device)
distributed.cleanup()
"""


@pytest.mark.slow
def test_weights_that_are_transposed_are_refused_on_several_ranks(monkeypatch, tmp_path, device):
    """transformers transposes the slices that a rank has read: the wrong ones."""
    text = dict(model_type="qwen3_vl_moe_text", num_experts=4, num_experts_per_tok=2)
    text |= dict(moe_intermediate_size=32, rope_parameters=ROPE | dict(mrope_section=[6, 5, 5]))
    vision = QWEN_VISION | dict(deepstack_visual_indexes=[0, 1])
    monkeypatch.setitem(ARCHITECTURES, "qwen3_vl_moe", with_images("qwen3_vl_moe", vision, **text))
    path = checkpoint("qwen3_vl_moe", tmp_path)
    load_policy(path, ARGS, device)
    done = run(2, LOAD, path, code=1)
    problem = "qwen3_vl_moe needs Transpose, which is not exact on several ranks"
    assert f"error: --model {path}: {problem}\n" in done.stderr


# ---- engines ----


@pytest.mark.slow
def test_engine_samples_from_the_trained_weights(sums, tmp_path):
    """vLLM: in extras/architectures/tests."""
    require_engine_has_the_weights("transformers", "gemma3", sums, tmp_path)


def require_engine_has_the_weights(engine: str, model_type: str, sums: Path, folder: Path) -> None:
    """The weights change in every step."""
    path = checkpoint(model_type, folder / "model")
    flags = (
        "--max_steps", 2, "--prompts_per_step", 2, "--samples_per_prompt", 2, "--lr", 1e-2,
        "--max_new_tokens", 8, "--eval_every", 0, "--dtype", "float32",
    )  # fmt: skip
    flags += ("--engine", engine, "--model", path, "--dataset", sums)
    run(1, "grpo.py", *flags, "--output_dir", folder / "run")
    lines = metrics(folder / "run")
    assert len(lines) == 2
    for line in lines:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4


# ---- files ----


@pytest.mark.parametrize("is_equal", [True, False])
def test_head_that_is_stored_beside_its_tied_embedding_is_equal(is_equal, gemma, tmp_path, device):
    """Then neither the trainer nor an export takes it. Of a real one transformers and vLLM have
    two readings."""
    folder = Path(shutil.copytree(gemma, tmp_path / "model"))
    embedding = stored(gemma)["language_model.model.embed_tokens.weight"]
    name = "language_model.lm_head.weight"
    head = {name: embedding.clone() if is_equal else embedding + 1e-3}
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    save_file(stored(gemma) | head, folder / "model.safetensors", metadata={"format": "pt"})
    if not is_equal:
        words = f"{name} is not .*embed_tokens.weight, but config.json ties them; set tie_word_em"
        with pytest.raises(ValueError, match=words):
            load_policy(str(folder), ARGS, device)
        return
    policy = load_policy(str(folder), ARGS, device)
    assert torch.equal(whole(policy.hf.lm_head.weight).cpu(), embedding)
    export_hf(policy, load_tokenizer(str(folder)), tmp_path / "hf")
    assert same(stored(tmp_path / "hf"), stored(gemma))


def test_files_beside_the_index_are_neither_read_nor_exported(gemma, tmp_path, device):
    """Mistral's folders have a second copy of the model under other names."""
    folder = Path(shutil.copytree(gemma, tmp_path / "model"))
    second = {f"second.{name}": weight for name, weight in stored(gemma).items()}
    save_file(second, folder / "consolidated.safetensors", metadata={"format": "pt"})
    policy = load_policy(str(folder), ARGS, device)
    export_hf(policy, load_tokenizer(str(folder)), tmp_path / "hf")
    assert same(stored(tmp_path / "hf"), stored(gemma))


@pytest.mark.parametrize("is_tied", [True, False])
def test_config_of_the_whole_model_decides_whether_its_head_is_tied(is_tied, tmp_path, device):
    """That of its language model may say the opposite (Qwen3-VL, SmolVLM)."""
    fields = dict(ARCHITECTURES["qwen3_vl"], tie_word_embeddings=is_tied)
    fields["text_config"] = fields["text_config"] | dict(tie_word_embeddings=not is_tied)
    config = AutoConfig.for_model("qwen3_vl", **fields)
    torch.manual_seed(0)
    full = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    full.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert ("lm_head.weight" in stored(tmp_path)) != is_tied
    policy = load_policy(str(tmp_path), ARGS, device)
    assert ("lm_head.weight" in policy.hf.all_tied_weights_keys) == is_tied
    require_numbers_of(opens_whole(tmp_path), str(tmp_path), device)
    export_hf(policy, load_tokenizer(str(tmp_path)), tmp_path / "hf")
    assert same(stored(tmp_path / "hf"), stored(tmp_path))
    exported = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert exported["tie_word_embeddings"] == is_tied


# ---- rows and flags ----


PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAQAAAAECAIAAAAmkwkpAAAAFElEQVR4nGPk5ORkgAEmBiSA"
    "mwMABkoAI8grnVEAAAAASUVORK5CYII="
)


def test_rows_with_images_are_refused(gemma, main, tmp_path):
    content = [dict(type="image", image=PNG), dict(type="text", text="What is this?")]
    turns = [dict(role="user", content=content), dict(role="assistant", content="A cat.")]
    (tmp_path / "rows.jsonl").write_text((json.dumps(dict(messages=turns)) + "\n") * 4)
    flags = ("--model", gemma, "--dataset", tmp_path / "rows.jsonl", "--output_dir", tmp_path / "x")
    with pytest.raises(ValueError, match="the row has images; set --vision frozen"):
        main("sft", *flags)
