"""Language models in checkpoints of images and text: they are trained alone, under the names of
their files, and all other weights are copied. test_coverage.py compares the numbers of every
family with transformers' own class; this file tests files, names and runs."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import assert_resumes_exactly, metrics, run
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from bench.models import ARGS, checkpoint, open_model, rows
from common.data.packing import pack
from common.data.sample import Sample
from common.model.hub import resolve_model
from common.model.loading import hub_weights, load_file_names
from common.model.policy import load_policy
from common.model.text_part import meta_model, text_weights

QUICK = ("gemma3", "qwen3_vl")
FAMILIES = (*QUICK, "gemma4", "mistral3", "smolvlm", "idefics3", "qwen2_5_vl", "qwen3_5",
            "qwen3_5_moe")  # fmt: skip
STEPS = ("--max_steps", 2, "--batch_size", 4, "--lr", 1e-2, "--eval_every", 0, "--save_every", 1,
         "--lr_schedule", "constant", "--dtype", "float32")  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[t if t in QUICK else pytest.param(t, marks=pytest.mark.slow) for t in FAMILIES],
)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(family, tmp_path_factory) -> str:
    return checkpoint(family, tmp_path_factory.mktemp(family))


def stored(folder: Path | str) -> dict[str, torch.Tensor]:
    """Return all weights of a folder by their names in its files."""
    weights = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def language_model(full: torch.nn.Module) -> torch.nn.Module:
    """Return the transformer of text in transformers' model of images and text."""
    inner = full.model
    return inner.text_model if hasattr(inner, "text_model") else inner.language_model


@torch.no_grad()
def logits(model, ids: list[int]) -> torch.Tensor:
    ids_1T = torch.tensor([ids])
    return model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T)).logits[0]


@torch.no_grad()
def logprobs(path: str, device, ids: list[int]) -> torch.Tensor:
    policy = load_policy(path, replace(ARGS, share_prefix=0), device)
    (mb,) = pack([Sample(ids, [True] * len(ids))], 100, device)
    return policy(mb)[0]


def opens_whole(folder: Path) -> torch.nn.Module:
    """Return the model of an export, whose files must have exactly the weights of its class."""
    model, info = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return model


# ---- names ----


def test_names_are_those_that_transformers_writes(family, path, tmp_path, device):
    """Each weight of the full class has a value of its own, by which the files show its name."""
    full = open_model(path)
    with torch.no_grad():
        for number, (_, weight) in enumerate(sorted(full.state_dict().items())):
            weight.fill_(number)
    full.save_pretrained(tmp_path)
    written = {name: weight.flatten()[0].item() for name, weight in stored(tmp_path).items()}
    hf = meta_model(path)
    names = load_file_names(hf, path)
    inner = {f"model.{name}": w for name, w in language_model(full).state_dict().items()}
    inner["lm_head.weight"] = full.state_dict()["lm_head.weight"]
    text = {name: value for name, value in hf.state_dict().items()}
    assert inner.keys() == text.keys()
    wanted = set()
    for name in text.keys() - hf.all_tied_weights_keys.keys():
        for in_files, _ in hub_weights(hf.config.model_type, name, inner[name], names):
            wanted.add(in_files)
            assert written[in_files] == inner[name].flatten()[0].item(), (name, in_files)
            assert names.is_of_text(in_files)
        assert names.in_model(names.of(name)) == name
    assert not any(names.is_of_text(name) for name in written.keys() - wanted)


# ---- runs ----


@pytest.fixture(scope="module")
def trained(family, path, sums, device, tmp_path_factory) -> Path:
    """Return the folder of a run of two steps with checkpoints of both."""
    folder = tmp_path_factory.mktemp(f"{family}_run")
    run(1, "sft.py", *STEPS, "--model", path, "--dataset", sums, "--output_dir", folder)
    return folder


def test_training_changes_the_language_model_alone(path, trained, device):
    """An export opens with the class of its base. All other parts have the bits of the base, and
    the text has the numbers of training."""
    before, after = stored(path), stored(trained / "hf")
    names = load_file_names(meta_model(path), path)
    assert before.keys() == after.keys()
    text = {name for name in before if names.is_of_text(name)}
    assert 0 < len(text) < len(before)
    for name in before:
        if name not in text:
            assert torch.equal(before[name], after[name]), name
    changed = {name for name in text if not torch.equal(before[name], after[name])}
    assert len(changed) > 0.8 * len(text), text - changed
    full = opens_whole(trained / "hf")
    ids = rows()[1]
    expected_TV = logits(full, ids)[:-1].log_softmax(-1)
    expected_T = expected_TV.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    logprobs_T = logprobs(str(trained / "hf"), device, ids).cpu()
    torch.testing.assert_close(logprobs_T, expected_T, atol=2e-5, rtol=0)


def test_checkpoint_converts_to_its_export(trained, device):
    """With the other parts too, and the class of the base."""
    found = Path(resolve_model(str(trained / "checkpoints" / "step_000002")))
    assert same(stored(found), stored(trained / "hf"))
    assert (found / "config.json").read_bytes() == (trained / "hf" / "config.json").read_bytes()
    opens_whole(found)


def test_weights_for_an_engine_are_those_of_the_policy(family, path, device):
    """They have the names of transformers' model, with a tied head too."""
    expected = load_policy(path, ARGS, device).hf.state_dict()
    weights = {}
    for name, weight in text_weights(path):
        assert name not in weights, name
        weights[name] = weight
    if family == "qwen3_5_moe":  # the files name each expert
        return
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        whole = expected[name]
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        assert torch.equal(weight, whole.cpu()), name


@pytest.mark.slow
def test_second_generation_trains_from_an_export(path, trained, sums, tmp_path):
    """Two generations leave the other parts as they were."""
    flags = (*STEPS, "--model", trained / "hf", "--dataset", sums, "--output_dir", tmp_path)
    run(1, "sft.py", *flags)
    names = load_file_names(meta_model(path), path)
    first, second = stored(path), stored(tmp_path / "hf")
    assert first.keys() == second.keys()
    for name in first:
        assert names.is_of_text(name) or torch.equal(first[name], second[name]), name
    opens_whole(tmp_path / "hf")


@pytest.mark.slow
def test_run_resumes_exactly(path, main, sums, tmp_path):
    flags = (*STEPS, "--model", path, "--dataset", sums, "--keep_last", 1)
    flags = (*flags, "--keep_last", 2)
    main("sft", *flags, "--output_dir", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000001" / "hf", ignore_errors=True)
    assert_resumes_exactly(main, "sft", *flags, folder=tmp_path / "run", finished=2)


@pytest.mark.slow
def test_update_does_not_depend_on_ranks(path, trained, sums, tmp_path):
    run(2, "sft.py", *STEPS, "--model", path, "--dataset", sums, "--output_dir", tmp_path)
    for a, b in zip(metrics(trained), metrics(tmp_path), strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert a[name] == pytest.approx(b[name], rel=1e-3), (a["step"], name)


# ---- adapters ----


@pytest.fixture(scope="module")
def adapted(family, path, sums, device, tmp_path_factory) -> Path:
    """Return the folder of a run that trained adapters."""
    folder = tmp_path_factory.mktemp(f"{family}_lora")
    flags = (*STEPS, "--model", path, "--dataset", sums, "--lora_rank", 2, "--output_dir", folder)
    run(1, "sft.py", *flags)
    return folder


@pytest.mark.slow
def test_adapters_are_merged_into_the_language_model(path, adapted, device):
    """The export and a converted checkpoint are equal and open with the class of the base; other
    weights have the bits of the base."""
    names = load_file_names(meta_model(path), path)
    before, after = stored(path), stored(adapted / "hf")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(names.is_of_text(name) for name in changed)
    assert all(before[name].ndim == 2 for name in changed)
    opens_whole(adapted / "hf")
    found = Path(resolve_model(str(adapted / "checkpoints" / "step_000002")))
    assert same(stored(found), after)


@pytest.mark.slow
def test_training_continues_from_an_adapter(path, adapted, sums, tmp_path):
    flags = (*STEPS, "--model", path, "--dataset", sums, "--lora_rank", 2)
    run(1, "sft.py", *flags, "--adapter", adapted / "adapter", "--output_dir", tmp_path)
    assert not same(stored(tmp_path / "hf"), stored(adapted / "hf"))
