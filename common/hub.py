"""Finding a checkpoint: `tiny`, a folder or a Hugging Face id -> a local folder and its tokenizer."""

import json
import os
from pathlib import Path

from common import distributed
from common.tiny import tiny_model


def resolve_model(model: str) -> str:
    """`tiny`, a folder or a Hugging Face id -> a local folder with config.json, safetensors and a tokenizer.

    One rank of each machine downloads, the others wait. Raises `ValueError` if there is no such model here or there.
    """
    if model == "tiny":
        return tiny_model()
    folder = Path(model).expanduser()
    if folder.is_dir():
        for name in ("config.json", "tokenizer_config.json"):
            if not (folder / name).is_file():
                raise ValueError(f"--model {model}: the folder has no {name}")
        if not any(folder.glob("*.safetensors")):
            raise ValueError(f"--model {model}: the folder has no *.safetensors weights")
        return str(folder)
    if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ValueError(f"--model {model}: no such folder")
    patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
    return download(f"--model {model}", model, "model", patterns)


def download(flag: str, repo_id: str, repo_type: str, patterns: list[str] | None = None) -> str:
    """Fetch a repository from the hub, or find it in the local cache. Raises `ValueError` naming `flag`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch() -> str | ValueError:
        try:
            return snapshot_download(repo_id, repo_type=repo_type, allow_patterns=patterns)
        except (LocalEntryNotFoundError, OSError) as error:
            if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code < 500:
                return ValueError(f"{flag}: no such folder, and no such {repo_type} on the hub that you may read")
            return ValueError(f"{flag}: no such folder, not in the local cache, and the hub cannot be reached")
        except HFValidationError:
            return ValueError(f"{flag}: no such folder, and not a valid Hugging Face id")

    answer = fetch() if int(os.environ.get("LOCAL_RANK", 0)) == 0 else None
    distributed.gather_objects(None)  # the others of this machine find it in the cache
    answer = answer or fetch()
    if isinstance(answer, ValueError):
        raise answer
    return answer


def load_tokenizer(path: str):
    """The checkpoint's tokenizer. Raises `ValueError` if it has no EOS, without which no completion ends."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"--model {path}: the tokenizer has no EOS token")
    return tokenizer


def eos_token_ids(path: str, tokenizer) -> list[int]:
    """Every token that ends a completion: the generation config's (chat models often have two) and the tokenizer's."""
    ids = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        if (file := Path(path) / name).is_file():
            listed = json.loads(file.read_text()).get("eos_token_id")
            ids.update(listed if isinstance(listed, list) else [listed])
    return sorted(ids - {None})
