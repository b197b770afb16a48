"""Values of flags that have a form of their own: `name=value` pairs, weighted data sets, named
held-out sets."""

from collections.abc import Sequence

from common.config.flags import MAX_FLOAT


def pairs_of(flag: str, pairs: Sequence[str]) -> dict[str, str]:
    """Return the pairs of `--flag name=value ...`. Raise `ValueError` for another form or a
    repeated name."""
    out: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not name or not value:
            raise ValueError(f"--{flag} {pair}: expected name=value")
        if name in out:
            raise ValueError(
                f"--{flag} {pair}: {'column ' if flag == 'columns' else ''}{name} is given twice"
            )
        out[name] = value
    return out


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
        names = " ".join(datasets)
        raise ValueError(
            f"--dataset {names}: only some have a weight; give all of them one, or none"
        )
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
