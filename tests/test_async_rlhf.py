"""The recipes of docs/asynchronous.md on rows with the columns of their data sets, with a tiny
random GPT-NeoX in place of Pythia."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from helpers import ROOT, run
from transformers import AutoConfig, AutoModelForSequenceClassification

from bench import models
from common.metrics.curves import read_metrics

POST = "SUBREDDIT: r/cats\n\nTITLE: My cat {0}\n\nPOST: It sleeps on box {0}.\n\nTL;DR:"
REPLY = dict(role="assistant", content="In a box.")
DIALOGUE = [dict(role="user", content="Hi"), dict(role="assistant", content="Hello.")]
RECIPES = [path.stem for kind in ("tldr", "hh") for path in ROOT.glob(f"configs/{kind}_*.yaml")]
ONLINE = sorted(name for name in RECIPES if name.split("_")[-1] in ("dpo", "rloo", "ppo"))


def tldr(i: int) -> dict:
    return dict(prompt=POST.format(i), completion=f" Cat {i} sleeps.")


def tldr_preference(i: int) -> dict:
    return dict(prompt=POST.format(i), chosen=f" Cat {i} sleeps.", rejected=f" I have {i} cats.")


def helpful(i: int) -> dict:
    prompt = [*DIALOGUE[: 2 * (i % 2)], dict(role="user", content=f"Where is cat {i}?")]
    return dict(prompt=prompt, chosen=[REPLY], rejected=[REPLY | dict(content="Who knows?")])


DATA = {  # name on the hub -> its row i, its splits
    "trl-lib/tldr": (tldr, ("train", "validation", "test")),
    "trl-lib/tldr-preference": (tldr_preference, ("train", "validation")),
    "trl-lib/hh-rlhf-helpful-base": (helpful, ("train", "test")),
}


@pytest.fixture(scope="module")
def pythia(tmp_path_factory) -> Path:
    """Folder of a random GPT-NeoX, `hf`, whose context holds the rows, and of a reward model."""
    folder = tmp_path_factory.mktemp("pythia")
    with mock.patch.dict(models.SIZES, max_position_embeddings=1024, num_hidden_layers=1):
        for name in ("hf", "reward"):
            models.checkpoint("gpt_neox", folder / name)
    config = AutoConfig.from_pretrained(folder / "reward", num_labels=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "reward")
    return folder


def flags_of(name: str, pythia: Path, folder: Path) -> list[object]:
    """Return the flags of a short run of a recipe on a stand-in of its data set in `folder`."""
    recipe = ROOT / f"configs/{name}.yaml"
    make_row, splits = DATA[yaml.safe_load(recipe.read_text())["dataset"]]
    data = folder / "data"
    data.mkdir(exist_ok=True)
    for split in splits:
        lines = [json.dumps(make_row(i)) + "\n" for i in range(8 if split == "train" else 2)]
        (data / f"{split}.jsonl").write_text("".join(lines))
    flags = ["--config", recipe, "--dataset", data, "--output_dir", folder / name]
    flags += ["--model", pythia / "hf"]
    if name.endswith(("_sft", "_rm")):
        return [*flags, "--max_steps", 2, "--batch_size", 4]
    flags += ["--reward", f"model:{pythia / 'reward'}", "--max_new_tokens", 6]
    flags += ["--engine", "transformers"]
    if name in ONLINE:
        flags += ["--prompts_per_step", 4, "--max_steps", 2, "--save_every", 1]
    if name.endswith("_ppo"):
        flags += ["--value_model", pythia / "reward"]
    if name.endswith("_eval"):
        flags += ["--reward_model", pythia / "reward", "--perplexity_model", pythia / "hf"]
    return flags


@pytest.mark.parametrize("name", ["tldr_sft", "hh_sft"])
def test_sft_trains_the_completion_and_its_eos(name, main, pythia, tmp_path, capsys):
    main("sft", *flags_of(name, pythia, tmp_path))
    text = capsys.readouterr().out
    template = (tmp_path / name / "hf/chat_template.jinja").read_text()
    if name == "hh_sft":
        assert "\n\nHuman: Where is cat" in text and "\n\nAssistant:⟦ In a box.<|eos|>⟧" in text
        assert template == (ROOT / "configs/templates/human_assistant.jinja").read_text()
    else:
        assert "\n\nTL;DR:⟦ Cat " in text and " sleeps.<|eos|>⟧" in text
    assert "eval_loss" in read_metrics(tmp_path / name / "metrics.jsonl")[-1]


@pytest.mark.parametrize("name", ["tldr_rm", "hh_rm"])
def test_reward_model_trains_on_pairs(name, main, pythia, tmp_path):
    main("rm", *flags_of(name, pythia, tmp_path))
    assert "eval_rewards/accuracies" in read_metrics(tmp_path / name / "metrics.jsonl")[-1]
    config = AutoConfig.from_pretrained(tmp_path / name / "hf")
    assert config.architectures == ["GPTNeoXForSequenceClassification"]


@pytest.mark.parametrize("name", [name for name in ONLINE if name != "tldr_online_dpo"])
def test_online_recipe_trains_and_its_checkpoints_are_measured(name, main, pythia, tmp_path):
    """Synchronous here; the next test has a rollout rank."""
    kind, script = name.split("_", 1)
    main(script, *flags_of(name, pythia, tmp_path), "--rollout_ranks", 0)
    last = read_metrics(tmp_path / name / "metrics.jsonl")[-1]
    assert last["step"] == 2 and {"rewards/model/mean", "eval/reward"} <= last.keys()
    if name == "tldr_rloo":  # measured like the next one
        return
    flags = flags_of(f"{kind}_eval", pythia, tmp_path)
    flags += ["--model", tmp_path / name / "checkpoints"]
    references = tmp_path / "references.jsonl"
    references.write_text("".join(json.dumps(dict(completion=" Yes.")) + "\n" for _ in range(2)))
    flags += ["--against", references]
    main("eval", *flags)
    lines = read_metrics(tmp_path / f"{kind}_eval/metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    names = {"win_rate", "reward_model", "reward_model_against", "perplexity"}
    assert all(names <= line.keys() for line in lines)


@pytest.mark.slow
def test_recipe_trains_on_the_samples_of_a_rollout_rank(pythia, tmp_path):
    flags = flags_of("tldr_online_dpo", pythia, tmp_path)
    run(2, "online_dpo.py", *flags, "--max_steps", 3)
    lines = read_metrics(tmp_path / "tldr_online_dpo/metrics.jsonl")
    assert lines[-1]["sampling/staleness/max"] == 1


def test_every_recipe_is_named_on_the_page():
    page = (ROOT / "docs/asynchronous.md").read_text(encoding="utf-8")
    assert [name for name in RECIPES if name not in page] == []
