"""Values of flags that have a form of their own: `name=value` pairs, weighted data sets, named
held-out sets, folders of adapters."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from common.config.flags import MAX_FLOAT
from common.parallel.process import first_line

ADAPTER_CONFIG = "adapter_config.json"  # of the PEFT library
# Its fields for adapters that compute something else than weight + lora_alpha / r B A.
OTHER_ADAPTERS = (
    "alora_invocation_tokens", "alpha_pattern", "fan_in_fan_out", "layer_replication", "lora_bias",
    "rank_pattern", "use_dora", "use_rslora",
)  # fmt: skip


def pairs_of(flag: str, pairs: Sequence[str]) -> dict[str, str]:
    """Return the pairs of `--flag name=value ...`. Raise `ValueError` for another form or a
    repeated name."""
    out: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not name or not value:
            raise ValueError(f"--{flag} {pair}: expected name=value")
        if name in out:
            raise ValueError(f"--{flag} {pair}: {name} is given twice")
        out[name] = value
    return out


def values_of(flag: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Return the pairs of `--flag name=value ...` with values as in YAML: true, 3, 0.5, null or
    `{"a": 1}`; anything else is text."""
    values: dict[str, Any] = {}
    for name, text in pairs_of(flag, pairs).items():
        values[name] = text
        with contextlib.suppress(yaml.YAMLError):
            values[name] = yaml.safe_load(text)
    return values


def weights_of(datasets: Sequence[str]) -> dict[str, float | None]:
    """Return the data sets of `--dataset a.jsonl:0.6 b/c:0.4` with their weights, None for each if
    none has one.

    Raises `ValueError` for an invalid weight, for weights of some data sets only, and for a
    repeated data set."""
    out: dict[str, float | None] = {}
    for spec in datasets:
        dataset, _, end = spec.rpartition(":")
        try:
            weight = float(end) if dataset else None
        except ValueError:  # the colon belongs to the name
            weight = None
        dataset = spec if weight is None else dataset
        if weight is not None and not 0 < weight <= MAX_FLOAT:
            raise ValueError(f"--dataset {spec}: the weight must be greater than 0")
        if dataset in out:
            raise ValueError(f"--dataset {spec}: {dataset} is given twice")
        out[dataset] = weight
    if len(out) > 1 and len({weight is None for weight in out.values()}) > 1:
        problem = "only some have a weight; give all of them one, or none"
        raise ValueError(f"--dataset {' '.join(datasets)}: {problem}")
    if not out:
        raise ValueError("--dataset needs at least one value")
    return out


def eval_sets_of(datasets: Sequence[str], flag: str = "eval_dataset") -> dict[str, str | None]:
    """Return the data sets of `--eval_dataset a.jsonl hard=b.jsonl` with their names, None for
    those without. The part before the first `=` is a name unless it contains a `/`: `./x=1.jsonl`
    is a file. Another `flag` has values of the same form.

    Raises `ValueError` for a repeated data set or name, and for a name without a data set.
    """
    out: dict[str, str | None] = {}
    for spec in datasets:
        name, equals, dataset = spec.partition("=")
        name, dataset = (name, dataset) if equals and "/" not in name else (None, spec)
        if name == "" or not dataset:
            raise ValueError(f"--{flag} {spec}: expected name={flag.removeprefix('eval_')}")
        earlier_names = {set_name or set_dataset for set_dataset, set_name in out.items()}
        for twice in {dataset} & out.keys() | {name or dataset} & earlier_names:
            raise ValueError(f"--{flag} {spec}: {twice} is given twice")
        out[dataset] = name
    if not out:
        raise ValueError(f"--{flag} needs at least one value")
    return out


def flags_of_adapter(folder: str) -> dict[str, Any]:
    """Return the flags that `--adapter` sets, from its adapter_config.json. Raises `ValueError` for
    an adapter that is not plain LoRA."""
    label = f"--adapter {folder}: {ADAPTER_CONFIG}"
    try:
        file = Path(folder).expanduser() / ADAPTER_CONFIG
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{label}: {first_line(error)}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{label} is not that of a LoRA adapter (peft_type LORA)")
    unsupported = [key for key in OTHER_ADAPTERS if config.get(key)]
    # Other initialisations change the weight as well.
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):
        unsupported.append("init_lora_weights")
    targets = config.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":  # a regular expression
        unsupported.append("target_modules")
    for key in unsupported:
        raise ValueError(f"{label}: its {key} is {config[key]}, which is not supported")
    flags = dict(lora_rank="r", lora_alpha="lora_alpha", lora_targets="target_modules")
    return {flag: config.get(key) for flag, key in flags.items()}
