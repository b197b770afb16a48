"""`--rope_factor`: trainer, export, engine and limits have the scaled model, as transformers
computes it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from helpers import metrics
from model.test_images_and_text import STEPS, checkpoint, logits, logprobs, opens_whole, rows
from model.test_policy import hf_model, samples, separate, small, write_checkpoint
from transformers import AutoConfig

from common.config.groups import TrainArgs
from common.data.packing import pack
from common.model.hub import context_length, load_tokenizer, resolve_model
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.train.checkpoint import export_hf

LENGTHS = (40, 7, 250)  # longer than the model's 64


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def base(folder: Path, form: int) -> str:
    """Return a model of 64 tokens with a config.json in the form of transformers 4 or 5."""
    config = transformers.LlamaConfig(
        **small(
            max_position_embeddings=64, rope_parameters=dict(rope_type="default", rope_theta=5e4)
        )
    )
    path = Path(write_checkpoint(config, folder))
    if form == 4:
        fields = json.loads((path / "config.json").read_text())
        theta = fields.pop("rope_parameters")["rope_theta"]
        fields |= dict(rope_theta=theta, rope_scaling=None)
        (path / "config.json").write_text(json.dumps(fields))
    return str(path)


def parameters_of(factor: float) -> dict:
    return dict(
        rope_type="yarn", factor=factor, rope_theta=5e4, original_max_position_embeddings=64
    )


@torch.no_grad()
def logprobs_of(path: str, device) -> torch.Tensor:
    policy = load_policy(path, TrainArgs(dtype="float32"), device)
    packs = [pack([sample], 1000, device)[0] for sample in samples(LENGTHS)]
    return torch.cat([policy(mb).logprobs_T.cpu() for mb in packs])


@torch.no_grad()
@pytest.mark.parametrize("form", [4, 5])
def test_scaled_model_is_that_of_transformers(form, tmp_path, device):
    path = base(tmp_path / "base", form)
    scaled = resolve_model(path, rope_factor=4.0)
    assert scaled == resolve_model(path, rope_factor=4.0) != path
    config = AutoConfig.from_pretrained(path)
    config.rope_parameters = parameters_of(4.0)
    config.max_position_embeddings = 256
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, config=config).eval()
    ours_T = logprobs_of(scaled, device)
    theirs_T = torch.cat([separate(plain, sample, 1.0)[0] for sample in samples(LENGTHS)])
    assert (ours_T - theirs_T).abs().max() < 1e-5
    unscaled_T = logprobs_of(path, device)
    assert (ours_T - unscaled_T).abs().mean() > 1e-3  # the scaling has an effect

    # the export, for transformers 4 and 5
    policy = load_policy(scaled, TrainArgs(dtype="float32"), device)
    export_hf(policy, load_tokenizer(tiny_model()), tmp_path / "hf", "plain")
    fields = json.loads((tmp_path / "hf/config.json").read_text())
    expected = parameters_of(4.0)
    theta = expected.pop("rope_theta")
    assert fields["max_position_embeddings"] == 256
    assert (fields["rope_theta"], fields["rope_scaling"]) == (theta, expected)
    assert AutoConfig.from_pretrained(tmp_path / "hf").rope_parameters == parameters_of(4.0)
    ids = torch.tensor([samples((200,))[0].ids])
    assert torch.equal(hf_model(str(tmp_path / "hf"))(ids).logits, plain(ids).logits)


def test_scaled_folder_has_the_files_of_the_model_and_a_longer_context():
    path, scaled = tiny_model(), resolve_model("tiny", rope_factor=4.0)
    names = {file.name for file in Path(path).iterdir()}
    assert {file.name for file in Path(scaled).iterdir()} == names
    assert (Path(scaled) / "model.safetensors").resolve() == Path(path) / "model.safetensors"
    args = TrainArgs(pack_tokens=10**5)
    assert context_length(scaled, args) == 4 * context_length(path, args)
    assert resolve_model("tiny", rope_factor=2.0) != scaled == resolve_model(scaled)


def test_changed_model_gets_another_folder(tmp_path):
    shutil.copytree(tiny_model(), tmp_path / "base")
    first = resolve_model(str(tmp_path / "base"), rope_factor=2.0)
    (tmp_path / "base/README.md").write_text("new")
    assert resolve_model(str(tmp_path / "base"), rope_factor=2.0) != first


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (
            lambda: transformers.LlamaConfig(**small(rope_parameters=parameters_of(2.0))),
            "config.json has yarn scaling already; leave the flag out",
        ),
        (
            lambda: transformers.Gemma3TextConfig(**small(head_dim=16)),
            "gemma3_text has no single kind of rotary embeddings",
        ),
    ],
)
def test_models_that_cannot_be_scaled_are_refused(config, what, tmp_path):
    path = write_checkpoint(config(), tmp_path / "base")
    with pytest.raises(ValueError, match=f"--rope_factor 2: {path}: {what}"):
        resolve_model(path, rope_factor=2.0)


def test_engine_samples_from_the_scaled_model(main, tmp_path):
    """The run compares the log-probs of engine and trainer, and its reference is scaled too. It
    resumes with the same flags, and its checkpoint is a scaled model."""
    flags = ["--model", "tiny", "--engine", "transformers", "--output_dir", tmp_path / "run"]
    flags += ["--rope_factor", 4, "--max_logprob_difference", 1e-4]
    flags += ["--prompts_per_step", 4, "--samples_per_prompt", 4, "--eval_every", 0]
    flags += ["--log_kl", "--max_new_tokens", 8]
    main("grpo", *flags, "--max_steps", 1)
    lines = metrics(tmp_path / "run")
    assert lines[-1]["sampling/sampling_logp_difference/max"] < 1e-4
    assert abs(lines[-1]["kl"]) < 1e-6
    main("grpo", *flags, "--max_steps", 2)
    model = resolve_model(str(tmp_path / "run/checkpoints/step_000002"))
    for folder in (model, tmp_path / "run/hf"):
        assert AutoConfig.from_pretrained(folder).rope_parameters["rope_type"] == "yarn"


@pytest.mark.slow
def test_rotary_embeddings_of_text_are_scaled(main, sums, tmp_path, device):
    """With the numbers of the full class, whose export has them in its text_config."""
    path = checkpoint("qwen3_vl", tmp_path / "model")
    flags = (*STEPS, "--model", path, "--dataset", sums, "--rope_factor")
    main("sft", *flags, 2, "--output_dir", tmp_path / "run")
    hf = tmp_path / "run" / "hf"
    text = json.loads((hf / "config.json").read_text())["text_config"]
    assert text["rope_parameters"]["rope_type"] == "yarn"
    assert text["max_position_embeddings"] == 512
    ids = rows()[4]
    expected_TV = logits(opens_whole(hf), ids)[:-1].log_softmax(-1)
    expected_T = expected_TV.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(logprobs(str(hf), device, ids).cpu(), expected_T, atol=2e-5, rtol=0)
