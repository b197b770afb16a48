"""Large data, tokenised once per machine.

One rank of each machine starts the tokenisation (tokenize.py). The results are Arrow files in the
cache of `datasets`, in `onefile_tokens/<digest>`. All ranks of the machine read them, in this run
and in later runs. The digest covers everything that determines the samples: the content of the data
files, the tokenizer with its chat template, flags and code. Complete folders are never deleted."""

import fcntl
import hashlib
import inspect
import json
import re
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from common.config.groups import TrainArgs
from common.data import durable
from common.data.files import BadRows
from common.data.load import (
    EncodeRows,
    Item,
    Part,
    Samples,
    data_files,
    in_memory,
    is_first_on_machine,
)
from common.data.sample import Sample
from common.data.tables import quiet_datasets
from common.parallel import distributed
from common.parallel.console import visible

# Flags that determine rows and ids. The process that tokenises gets only these and the script's own
# flags. A flag that is missing here therefore raises AttributeError and does not give a wrong
# sample.
FLAGS = (
    "dataset",
    "dataset_flag",
    "dataset_split",
    "dataset_config",
    "eval_dataset",
    "eval_split",
    "eval_size",
    "columns",
    "on_bad_row",
    "prompt_format",
    "system_prompt",
    "template_kwargs",
    "special_text",
    "takes_images",
    "max_pixels",
)


def load_tokenised(
    encode_rows: EncodeRows,
    choices: Sequence[tuple[str, ...]],
    tokenizer,
    args: TrainArgs,
    flags: Sequence[str],
    kept: Sequence[str],
) -> list[Part]:
    """Return the samples of the training rows and of the held-out rows from disk, see
    `load_samples`. Collective."""
    known = {name: getattr(args, name) for name in (*FLAGS, *flags)}
    known["eval_every"] = min(args.eval_every, 1)
    known["vision"] = "frozen"  # no matter for the ids; `use_images` sets it below
    task = (encode_rows, choices, kept, tokenizer, SimpleNamespace(**known))
    digest = _digest(*task) if is_first_on_machine() else None
    digests = set(distributed.gather_objects(digest)) - {None}
    if len(digests) > 1:
        problem = "the files differ between machines; copy the same files to all"
        raise ValueError(f"{args.dataset_flag}: {problem}")
    folder = Path(quiet_datasets().config.HF_DATASETS_CACHE) / "onefile_tokens" / digests.pop()
    if is_first_on_machine() and _damage(folder):
        _write(folder, *task)
    distributed.barrier()
    if source := _source_with_images(folder):
        from extras.images.encoder import use_images

        use_images(args, source)
    return _read(folder)


# ---- the folder of a digest ----


def _write(folder: Path, *task) -> None:
    """Tokenise into `folder`, unless another run has completed it meanwhile. The folder has another
    name until it is complete. An incomplete folder of this machine was left by a killed process and
    is deleted."""
    from common.data.tokenize import tokenise

    incomplete = folder.with_name(f"{folder.name}.{socket.gethostname()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{incomplete}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases the lock of a killed process
            problem = _damage(folder)
            if not problem:
                return
            if folder.exists():
                message = f"{folder} is damaged ({problem}); tokenising the data again"
                print(visible(message), flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(incomplete, ignore_errors=True)
            incomplete.mkdir()
            distributed.say(f"tokenising the data, once on this machine, into {folder.parent}")
            try:
                tokenise(incomplete, *task)
                durable.rename(incomplete, folder)
            except OSError:
                if not folder.exists():  # else another machine with the same disk was faster
                    raise
            finally:
                shutil.rmtree(incomplete, ignore_errors=True)
    except OSError as error:
        why = f"cannot write {folder} ({error.strerror or error}); set HF_DATASETS_CACHE"
        raise distributed.RunError(f"the tokenised data: {why}") from error


def _damage(folder: Path) -> str | None:
    """Return what is wrong with the files in the folder, None if they are as they were written."""
    try:
        files = durable.read_json(folder / "about.json")["files"]
        return "a file was changed" if durable.fingerprints(folder, files) != files else None
    except (OSError, ValueError, KeyError) as error:
        return distributed.first_line(error)


def _read(folder: Path) -> list[Part]:
    """Return the samples of a folder, and report its bad rows as the first start did."""
    about = durable.read_json(folder / "about.json")
    parts: list[Part] = []
    reports: list[list[str]] = about["bad_rows"]
    for name in about["parts"]:
        part, errors = _read_part(sorted(folder.glob(f"{name}*.arrow")))
        parts.append(part)
        reports.append(errors)
    for errors in reports:
        bad = BadRows("skip")
        bad.errors = errors
        bad.report()
    return parts


def _read_part(files: list[Path]) -> tuple[Part, list[str]]:
    """Return the samples in Arrow files, and the errors of the bad rows."""
    import numpy as np
    import pyarrow.compute as pc

    if not files:
        return in_memory([], Counter(), []), []
    table = _table(files)
    # indices of the rows with samples
    numbers = np.flatnonzero(pc.list_value_length(table["samples"]))
    datasets = table["dataset"].combine_chunks().dictionary_encode()
    names = datasets.dictionary.to_pylist()
    rows = [dict(_dataset=name) if name else {} for name in names]
    sample_rows = [rows[i] for i in datasets.indices.to_numpy()[numbers]]
    item = partial(_item, table["samples"], table["is_group"], numbers)
    counts = Counter(pc.list_flatten(table["reasons"]).to_pylist())
    errors = pc.list_flatten(table["errors"]).to_pylist()
    return Part(Samples(sample_rows, item), counts, rows), errors


def _table(files: list[Path]):
    import pyarrow as pa

    return pa.concat_tables(pa.ipc.open_stream(pa.memory_map(str(f))).read_all() for f in files)


def _source_with_images(folder: Path) -> str | None:
    """Return the source of a row with images, None or an empty text without one."""
    import pyarrow.compute as pc

    files = sorted(folder.glob("*.arrow"))
    return pc.max(_table(files)["image_source"]).as_py() if files else None


def _item(samples, is_group, numbers: Sequence[int], i: int) -> Item:
    """Build item `i`, a sample or a group, from Arrow columns. `numbers`: row of each item."""
    number = int(numbers[i])
    stored = samples[number].as_py()
    group = [Sample(**fields | dict(row=json.loads(fields["row"]))) for fields in stored]
    return group if is_group[number].as_py() else group[0]


# ---- the digest ----


def _digest(
    encode_rows: EncodeRows,
    choices: Sequence,
    kept: Sequence,
    tokenizer,
    args: SimpleNamespace,
) -> str:
    """Return the digest of everything that determines the samples.

    It covers the content of files and not their times, which copies and clocks change; reading is
    much faster than tokenising. It covers the script up to its `main`."""
    import tokenizers
    import transformers

    script, _, _ = Path(inspect.getsourcefile(encode_rows)).read_text().partition("\ndef main(")
    files = data_files(args)
    inputs = [
        tokenizers.__version__,
        transformers.__version__,
        encode_rows.__qualname__,
        script,
        [module.read_text() for module in _modules(encode_rows)],
        choices,
        kept,
        sorted(vars(args).items()),
        sorted({str(file.resolve().parent) for file in files}),  # of images by path
    ]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
        tokenizer.save_pretrained(folder)
        files += sorted(file for file in Path(folder).rglob("*") if file.is_file())
        files += _image_files(Path(tokenizer.name_or_path))
        names = [file.name for file in files]
        inputs += zip(names, threads.map(_content, files), strict=True)
    return hashlib.blake2b(repr(inputs).encode(), digest_size=16).hexdigest()


def _image_files(model: Path) -> list[Path]:
    """Return the files of a model that determine the placeholders of an image, if it reads any."""
    names = ("config.json", "preprocessor_config.json", "processor_config.json")
    files = [model / name for name in names if (model / name).is_file()]
    return files if len(files) > 1 else []


def _modules(encode_rows: Callable) -> list[Path]:
    """Return the modules of data/ and images/, and those of common/ that define what the function
    names."""
    words = set(re.findall(r"\w+", inspect.getsource(encode_rows)))
    named = [value for name, value in encode_rows.__globals__.items() if name in words]
    modules = {getattr(value, "__module__", None) or "" for value in named}
    files = {Path(sys.modules[name].__file__) for name in modules if name.startswith("common.")}
    data = Path(__file__).parent
    return sorted(files | {*data.glob("*.py"), *data.with_name("images").glob("*.py")})


def _content(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "blake2b").hexdigest()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
