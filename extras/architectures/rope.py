"""`--rope_factor`: a model with rotary embeddings scaled as in YaRN, as a folder.

The folder has links to the files of the model, and a config.json with the scaling. All that reads a
model reads this one: trainer, references, engine, exports, checkpoints and the limits of lengths.
"""

import contextlib
import json
import os
import tempfile
from hashlib import blake2b
from pathlib import Path

from common.model.loading import load_config
from common.parallel import durable


def scaled_folder(path: str, factor: float) -> str:
    """Return the folder of the model in `path` with a context times `factor`. It is made on first
    use, in the cache, and again after a change of the model. Raises `ValueError` for a model whose
    embeddings cannot be scaled."""
    base = Path(path).resolve()
    config = json.dumps(scaled_config(path, factor), indent=2).encode()
    unlinked = ("config.json", durable.CHECKSUMS)
    files = [file for file in sorted(base.iterdir()) if file.exists() and file.name not in unlinked]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = blake2b(repr((str(base), stats)).encode() + config, digest_size=6).hexdigest()

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onefile"
    folder = cache / f"{base.name}-yarn-{factor:g}-{digest}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            for file in files:
                Path(work, file.name).symlink_to(file)
            Path(work, "config.json").write_bytes(config)
            with contextlib.suppress(OSError):  # the first of several ranks wins
                Path(work).rename(folder)
    return str(folder)


def scaled_config(path: str, factor: float) -> dict[str, object]:
    """Return the fields of config.json with the scaling, in the file's own form (transformers 4 or
    5). The model's context is the length that it was trained for."""
    config = load_config(path).get_text_config()
    label = f"--rope_factor {factor:g}: {path}"
    parameters = getattr(config, "rope_parameters", None) or {}
    context = getattr(config, "max_position_embeddings", None)
    if "rope_theta" not in parameters or not context:
        raise ValueError(f"{label}: {config.model_type} has no single kind of rotary embeddings")
    known = parameters.get("rope_type", "default")
    if known != "default":
        raise ValueError(f"{label}: config.json has {known} scaling already; leave the flag out")
    scaling = dict(rope_type="yarn", factor=factor, original_max_position_embeddings=context)
    whole = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    fields = whole.get("text_config", whole)  # of a model of images and text
    fields["max_position_embeddings"] = int(factor * context)
    if "rope_parameters" in fields:
        fields["rope_parameters"] = parameters | scaling
    else:
        fields["rope_scaling"] = scaling
    return whole
