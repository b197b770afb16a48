"""The model card of an export, a function of flags, metrics and machine; and the upload of a
finished run."""

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

import torch
import yaml

from common.config.groups import BUILT_IN_MODELS, TrainArgs, flags_of, script_of
from common.config.specs import weights_of
from common.metrics.curves import read_metrics
from common.model.policy import PackedModel
from common.parallel import distributed

MARK = "<!-- The next export replaces this file; delete this line to keep your edits. -->"
PATHS = re.compile(r"(?<![^\s=:'\"])[~/]\S*/(?=[^/\s])")  # an absolute path up to its last name
NOT_SHOWN = ("output_dir", "resume", "log", "push_to_hub")  # flags that change no result


def card_files(
    args: TrainArgs, model: PackedModel, curves: Sequence[str], folder: Path
) -> dict[str, bytes]:
    """Return the card of an export to `folder`, with the picture of its curves, on rank 0; nothing
    on other ranks. An old card without `MARK` stays."""
    if not distributed.is_main():
        return {}
    picture = Path(args.output_dir, "curves.png")
    files = {picture.name: picture.read_bytes()} if picture.is_file() else {}
    old = folder / "README.md"
    if old.is_file() and MARK.encode() not in old.read_bytes():
        return files | {old.name: old.read_bytes()}
    base = _base_card(args.model, model.path)
    front = yaml.safe_dump(_front_matter(args, base, folder), allow_unicode=True)
    text = PATHS.sub("", _text(args, model, curves, base, bool(files)))
    return files | {old.name: f"---\n{front}---\n{MARK}\n\n{text}".encode()}


def _front_matter(args: TrainArgs, base: dict, folder: Path) -> dict[str, object]:
    """Return the metadata of a card, which the hub reads."""
    front = {key: base[key] for key in ("license", "base_model") if base.get(key)}
    front["tags"] = ["onefile", script_of(type(args)).stem]
    front["library_name"] = "peft" if "adapter" in folder.name else "transformers"
    on_hub = [
        name
        for name in weights_of(args.dataset)
        if re.fullmatch(r"[\w-]+/[\w.-]+", name) and not os.path.exists(name)
    ]
    if on_hub:
        front["datasets"] = on_hub
    return front


def _text(
    args: TrainArgs, model: PackedModel, curves: Sequence[str], base: dict, has_picture: bool
) -> str:
    script = script_of(type(args))
    on_cuda = model.device.type == "cuda"
    ranks_per_node = os.environ.get("LOCAL_WORLD_SIZE", 1)
    defaults = flags_of(type(args)())
    flags = {
        name: value
        for name, value in flags_of(args).items()
        if value != defaults[name] and name not in NOT_SHOWN
    }
    return f"""# {Path(args.output_dir).resolve().name}

- base: {args.model}; licence: {base.get("license", "unknown")}
- data: {" ".join(args.dataset)}
- machine: {torch.cuda.get_device_name(model.device) if on_cuda else "CPU"}; {model.compute_dtype};
  torch {torch.__version__}, transformers {version("transformers")}
- training ranks: {distributed.world_size()}
- command: `torchrun --nproc_per_node {ranks_per_node} {script.name} --config flags.yaml`

flags.yaml has the flags that differ from the defaults. Absolute paths are cut to their last name.

```yaml
{yaml.safe_dump(flags, sort_keys=False, allow_unicode=True)}```

| metric | first | last |
| --- | --- | --- |
{_table(Path(args.output_dir, "metrics.jsonl"), curves)}
{"![curves](curves.png)" if has_picture else ""}

Limitations: the metrics come from training and its held-out rows. The model was not evaluated
beyond the above: not on other tasks, and not for safety or factual accuracy. Faults and biases of
the base and of the data may remain.
"""  # noqa: E501


def _table(metrics: Path, curves: Sequence[str]) -> str:
    """Return a row for each metric that matches one of `curves`, with its first and last value."""
    lines = read_metrics(metrics)
    names = dict.fromkeys(name for line in lines for name in line)
    rows = ""
    for name in names:
        if any(fnmatch(name, pattern) for pattern in curves):
            points = [f"{line[name]:.4g} (step {line['step']})" for line in lines if name in line]
            rows += f"| {name} | {points[0] if len(points) > 1 else '-'} | {points[-1]} |\n"
    return rows


def _base_card(name: str, path: str) -> dict:
    """Return the metadata of the base's card, empty without one; `base_model` is the nearest base
    on the hub."""
    from huggingface_hub import hf_hub_download, metadata_load

    is_local = name in BUILT_IN_MODELS or Path(name).expanduser().exists()
    try:
        card = Path(path, "README.md") if is_local else hf_hub_download(name, "README.md")
        metadata = metadata_load(card) or {}
    except Exception:  # no card, no network, or metadata of another form
        metadata = {}
    return metadata if is_local else metadata | dict(base_model=name)


def publish(args: TrainArgs, upload: bool = False) -> str | None:
    """Check on rank 0 that `--push_to_hub` will succeed, and create its repository, a private one.
    With `upload`, upload `hf/`, and `adapter/` as a folder beside it. Return a problem, None
    without one."""
    from huggingface_hub import HfApi

    if not distributed.is_main():
        return None
    name = args.push_to_hub
    label = f"--push_to_hub {name}"
    hf = Path(args.output_dir, "hf")
    api = HfApi()
    try:
        api.whoami()  # its errors explain a missing or a wrong token
        url = api.create_repo(name, private=True, exist_ok=True)
        api.auth_check(url.repo_id, write=True)
        for source, place in ((hf, ""), (hf.with_name("adapter"), "adapter")):
            if upload and source.is_dir():
                api.upload_folder(repo_id=url.repo_id, folder_path=source, path_in_repo=place)
    except Exception as error:  # of the name, the hub or the network
        reason = getattr(error, "server_message", None) or distributed.first_line(error)
        later = f"; later: hf upload {name} {hf} . --private" if upload else ""
        return f"{label}: cannot upload: {reason}{later}"
    distributed.say(f"{label}: {f'{hf} is at' if upload else 'will be at'} {url}")
    return None
