"""The model card of an export, a function of flags, metrics and machine; and the upload of a finished run."""

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

import torch
import yaml

from common.config.groups import BUILT_IN_MODELS, BaseArgs, TrainArgs
from common.config.launch import flags_of
from common.config.parse import script_of
from common.config.specs import weights_of
from common.metrics.curves import read_metrics
from common.model.policy import PackedModel
from common.parallel import distributed

MARK = "<!-- The next export replaces this file; delete this line to keep your edits. -->"
PATHS = re.compile(r"(?<![^\s=:'\"])[~/]\S*/(?=[^/\s])")  # an absolute path up to its last name
NOT_SHOWN = ("output_dir", "resume", "log", "push_to_hub")  # flags that change no result


def card_files(args: TrainArgs, model: PackedModel, curves: Sequence[str], folder: Path) -> dict[str, bytes]:
    """Return the card of an export to `folder`, with the picture of its curves. An old card without `MARK` stays."""
    old, picture, script = folder / "README.md", Path(args.output_dir, "curves.png"), script_of(type(args))
    files = {picture.name: picture.read_bytes()} if picture.is_file() else {}
    if old.is_file() and MARK.encode() not in old.read_bytes():
        return files | {old.name: old.read_bytes()}
    base, defaults = _base_card(args.model, model.path), flags_of(type(args)())
    flags = {k: v for k, v in flags_of(args).items() if v != defaults[k] and k not in NOT_SHOWN}
    front = {key: base[key] for key in ("license", "base_model") if base.get(key)}
    front |= dict(tags=["onefile", script.stem], library_name="peft" if "adapter" in folder.name else "transformers")
    if ids := [d for d in weights_of(args.dataset) if re.fullmatch(r"[\w-]+/[\w.-]+", d) and not os.path.exists(d)]:
        front["datasets"] = ids
    lines, table = read_metrics(Path(args.output_dir, "metrics.jsonl")), ""
    for name in dict.fromkeys(key for line in lines for key in line if any(fnmatch(key, c) for c in curves)):
        points = [f"{line[name]:.4g} (step {line['step']})" for line in lines if name in line]
        table += f"| {name} | {points[0] if len(points) > 1 else '-'} | {points[-1]} |\n"
    text = f"""# {Path(args.output_dir).resolve().name}

- base: {args.model}; licence: {base.get("license", "unknown")}
- data: {" ".join(args.dataset)}
- machine: {torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "CPU"}; {model.compute_dtype};
  torch {torch.__version__}, transformers {version("transformers")}
- training ranks: {distributed.world_size()}
- command: `torchrun --nproc_per_node {os.environ.get("LOCAL_WORLD_SIZE", 1)} {script.name} --config flags.yaml`

flags.yaml has the flags that differ from the defaults. Absolute paths are cut to their last name.

```yaml
{yaml.safe_dump(flags, sort_keys=False, allow_unicode=True)}```

| metric | first | last |
| --- | --- | --- |
{table}
{"![curves](curves.png)" if files else ""}

Limitations: the metrics come from training and its held-out rows. The model was not evaluated beyond the above: not on
other tasks, and not for safety or factual accuracy. Faults and biases of the base and of the data may remain.
"""
    text = f"---\n{yaml.safe_dump(front, allow_unicode=True)}---\n{MARK}\n\n{PATHS.sub('', text)}"
    return files | {old.name: text.encode()}


def _base_card(name: str, path: str) -> dict:
    """Return the metadata of the base's card, empty without one; `base_model` is the nearest base on the hub."""
    from huggingface_hub import hf_hub_download, metadata_load

    here = name in BUILT_IN_MODELS or Path(name).expanduser().exists()
    try:
        found = metadata_load(Path(path, "README.md") if here else hf_hub_download(name, "README.md")) or {}
    except Exception:  # no card, no network, or metadata of another form
        found = {}
    return found if here else found | dict(base_model=name)


def publish(args: BaseArgs, upload: bool = False) -> str | None:
    """Check on rank 0 that `--push_to_hub` will succeed, and create its repository, a private one. With `upload`,
    upload `hf/`, and `adapter/` as a folder beside it. Return a problem, None without one."""
    from huggingface_hub import HfApi

    if not isinstance(args, TrainArgs) or (name := args.push_to_hub) is None or not distributed.is_main():
        return None
    api, hf = HfApi(), Path(args.output_dir, "hf")
    try:
        api.whoami()  # its errors explain a missing or a wrong token
        url = api.create_repo(name, private=True, exist_ok=True)
        api.auth_check(url.repo_id, write=True)
        for source, place in ((hf, ""), (hf.with_name("adapter"), "adapter")) if upload else ():
            if source.is_dir():
                api.upload_folder(repo_id=url.repo_id, folder_path=source, path_in_repo=place)
    except Exception as error:  # of the name, the hub or the network
        why = f"cannot upload: {getattr(error, 'server_message', None) or distributed.first_line(error)}"
        return f"--push_to_hub {name}: {why}" + (f"; later: hf upload {name} {hf} . --private" if upload else "")
    distributed.say(f"--push_to_hub {name}: {f'{hf} is at' if upload else 'will be at'} {url}")
