"""Files of adapters alone, in the format of the PEFT library: `adapter/` of a run, and
`--adapter`."""

import json
from pathlib import Path

from torch import Tensor, nn

from common.config.groups import BUILT_IN_MODELS
from common.config.training import LoRAArgs
from common.model.loading import one_line_errors, require_unchanged, whole
from common.model.lora import layers_of, trained_parameters
from common.parallel import distributed, durable

# Names of the PEFT library: files, and the prefix of the model's names.
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


def save_adapter(hf: nn.Module, path: str, args: LoRAArgs, folder: Path) -> None:
    """Write the adapter alone, in the format of the PEFT library; `path` is the folder of its
    model. The old folder stays until the new one is complete. Collective."""
    from safetensors.torch import save_file

    tensors = {}
    for name, parameter in trained_parameters(hf).items():
        tensor = whole(parameter.detach())
        if distributed.is_main():
            ending = "" if name == "score.weight" else ".weight"
            tensors[PREFIX + name + ending] = tensor.cpu().contiguous()
    if distributed.is_main():
        work = folder.with_suffix(".tmp")
        work.mkdir(parents=True)
        save_file(tensors, work / WEIGHTS, metadata={"format": "pt"})
        (work / CONFIG).write_text(json.dumps(_peft_config(hf, path, args), indent=2))
        durable.write_checksums(work)
        durable.replace_folder(work, folder)
    distributed.barrier()


def _peft_config(hf: nn.Module, path: str, args: LoRAArgs) -> dict[str, object]:
    """Return the fields of adapter_config.json. Layers have the endings of their names if these
    mean no other layers, else whole names."""
    adapted = set(layers_of(hf))
    endings = {name.rpartition(".")[2] for name in adapted}
    linear = {name for name, module in hf.named_modules() if isinstance(module, nn.Linear)}
    is_all = adapted == {name for name in linear if name.rpartition(".")[2] in endings}
    is_local = args.model in BUILT_IN_MODELS or Path(args.model).expanduser().exists()
    is_scalar = hasattr(hf, "score")
    name, _, revision = (
        (str(Path(path).resolve()), "", "") if is_local else args.model.partition("@")
    )
    return dict(
        peft_type="LORA",
        base_model_name_or_path=name,
        revision=revision or None,
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules=sorted(endings if is_all else adapted),
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=False,
        init_lora_weights=True,
        inference_mode=True,
        task_type="SEQ_CLS" if is_scalar else "CAUSAL_LM",
        modules_to_save=["score"] if is_scalar else None,
    )


def read_adapter(hf: nn.Module, args: LoRAArgs) -> dict[str, Tensor]:
    """Return the weights of `--adapter` for the parameters of `hf`, by their names. Raises
    `ValueError` for an adapter of other layers, or of another rank, scale or method."""
    from safetensors.torch import load_file

    label = f"--adapter {args.adapter}"
    folder = Path(args.adapter).expanduser()
    require_unchanged(label, folder)
    with one_line_errors(label):
        config = durable.parse_json((folder / CONFIG).read_text())
        tensors = load_file(folder / WEIGHTS)
    _require_same_kind(label, config, args)
    stored = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        stored[name.removesuffix(".weight") if "lora_" in name else name] = tensor
    wanted = trained_parameters(hf)
    # An adapter of a language model has no head.
    for name in sorted(wanted.keys() - stored.keys() - {"score.weight"}):
        raise ValueError(
            f"{label}: no {name} in it; --lora_targets must be its layers,"
            f" {config['target_modules']}"
        )
    for name, tensor in stored.items():
        if name not in wanted:
            raise ValueError(f"{label}: --model with these --lora_targets has no {name}")
        if tensor.shape != wanted[name].shape:
            raise ValueError(
                f"{label}: {name} is {list(tensor.shape)}, --model needs {list(wanted[name].shape)}"
            )
    distributed.say(f"{label}: made for {config.get('base_model_name_or_path')}")
    return stored


def _require_same_kind(label: str, config: object, args: LoRAArgs) -> None:
    """Raise `ValueError` if adapter_config.json is not that of a LoRA adapter as the flags make
    it."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{label}: {CONFIG} is not that of a LoRA adapter (peft_type LORA)")
    for key, flag in dict(r="lora_rank", lora_alpha="lora_alpha").items():
        stored = config.get(key)
        if stored != getattr(args, flag):
            raise ValueError(f"{label}: its {key} is {stored}, --{flag} is {getattr(args, flag)}")
    changing = ("use_rslora", "alpha_pattern", "fan_in_fan_out", "layer_replication")
    unsupported = [key for key in changing if config.get(key)]
    # Other initialisations change W as well.
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):
        unsupported.append("init_lora_weights")
    for key in unsupported:
        raise ValueError(f"{label}: its {key} is {config[key]}, which is not supported")
