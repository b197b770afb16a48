"""Reward models: `--reward model:PATH`, any sequence classifier with one label, each asked in its own words."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch

from common.config.groups import SamplingArgs
from common.data.chat import rendered
from common.data.encode import Encoder
from common.data.packing import Sample, pack, per_sample
from common.data.rows import PROMPT_COLUMNS, require_columns
from common.model.hub import load_tokenizer
from common.model.policy import PackedModel, ScalarModel, load_scalar_model
from common.parallel.distributed import first_line
from common.rewards.functions import Failure, Value


class RewardModel:
    """A frozen reward model, sharded over the ranks. Call it with groups of samples; it is collective.

    With the policy's vocabulary and chat template it reads the policy's token ids. Another one is given the
    conversation as text, the prompt's messages and the completion in its own chat template, or of a plain prompt the
    prompt's text and the completion's, in the tokens of its own tokenizer. Its number is read at the last token, or, if
    rm.py trained it, at the token that ends the turn.
    """

    def __init__(self, flag: str, path: str, args: SamplingArgs, rows: list[dict], tokenizer, device: torch.device):
        """Raises `ValueError` naming `flag` for what is no reward model, or has another tokenizer than the policy's and
        no way to be asked about these rows."""
        from transformers import AutoConfig

        self.flag = f"{flag} {path}"
        self.args, self.device, self.tokenizer = args, device, load_tokenizer(path, flag=flag)
        self.at_end_of_turn = AutoConfig.from_pretrained(path).to_dict().get("scored_at") == "end_of_turn"
        self.same = _reads_alike(self.tokenizer, tokenizer)
        if not self.same:
            if args.environment is not None:
                raise ValueError(f"{self.flag}: another tokenizer than --model's, which --environment has no text for")
            self.column = "_prompt" if "_prompt" in rows[0] else require_columns("--dataset", rows, PROMPT_COLUMNS)[0]
            self.encoder = Encoder(tokenizer, args)
            if self.tokenizer.chat_template is None and isinstance(self.encoder.as_asked(rows[0], self.column), list):
                raise ValueError(f"{self.flag}: prompts are messages, and its tokenizer has no chat template")
            self._ids(Sample([], [], text="?", row=rows[0]))  # its template may refuse a system prompt, say
        self.model = load_scalar_model(path, args, device, trainable=False, flag=flag)

    def __call__(self, groups: list[list[Sample]]) -> list[Value]:
        """A number for each sample, or why there is none: it is too long, or the template refuses it."""
        asked = [self._ids_or_failure(sample) for sample in chain(*groups)]
        sequences = [ids for ids in asked if not isinstance(ids, Failure)]
        numbers = iter(score(self.model, sequences, self.args.pack_tokens, self.device))
        return [ids if isinstance(ids, Failure) else next(numbers) for ids in asked]

    def scores(self, samples: list[Sample]) -> list[float]:
        """Its numbers of all of them. Collective. Raises `ValueError` naming the row if there is none of one."""
        values = self([samples])
        for sample, value in zip(samples, values, strict=True):
            if isinstance(value, Failure):
                raise ValueError(f"{sample.row['_source']}: {value.what}")
        return values

    def _ids_or_failure(self, sample: Sample) -> list[int] | Failure:
        try:
            ids = sample.ids if self.same else self._ids(sample)
            require_context(self.model, len(ids))
            if len(ids) > self.args.room:
                raise ValueError(f"{self.flag}: a sequence of {len(ids)} tokens is longer than {self.args.room_flags}")
        except ValueError as error:
            return Failure(first_line(error))
        return ids

    def _ids(self, sample: Sample) -> list[int]:
        """The conversation for this model. A plain completion that was cut off has no EOS here either.

        Raises `ValueError` if the chat template refuses it."""
        prompt, end = self.encoder.as_asked(sample.row, self.column), self.tokenizer.eos_token_id
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt + sample.text)["input_ids"]
            ids = ids[:-1] if ids[-1] == end else ids  # some tokenizers put it there themselves
            return ids if sample.finish_reason == "length" else ids + [end]
        messages = [*prompt, dict(role="assistant", content=sample.text)]
        text = rendered(self.tokenizer, messages, f"{self.flag}: its")
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        while self.at_end_of_turn and ids[-1] not in self.tokenizer.added_tokens_decoder:
            ids.pop()
        return ids


def _reads_alike(ours, theirs) -> bool:
    """Whether two tokenizers have the same vocabulary and chat template."""
    return ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template


def short_names(rewards: Sequence[str]) -> dict[str, str]:
    """What metrics call each of `--reward`: a function by its name, a model `model` or, of several, `model/` and as
    much of the end of its path as tells it from the others."""
    paths = {name: Path(name.removeprefix("model:")).parts for name in rewards if name.startswith("model:")}
    for length in range(1, 1 + max(map(len, paths.values()), default=0)):
        tails = {name: "/".join(parts[-length:]) for name, parts in paths.items()}
        if len(set(tails.values())) == len(paths):
            break
    names = {name: name.rpartition(":")[2] for name in rewards}
    return names | {name: "model" if len(paths) == 1 else f"model/{tails[name]}" for name in paths}


def at_end(ids: list[int], row: dict | None = None) -> Sample:
    """A sample of which a scalar model is read once, having seen all of `ids`. Streams follow the targets and the last
    token has none, so one is put behind it; which one does not matter, it is never an input."""
    return Sample(ids + ids[-1:], [False] * len(ids) + [True], row=row or {})


def require_context(model: PackedModel, longest: int) -> None:
    """Raises `ValueError` if the longest sequence is longer than the model's context."""
    context = getattr(model.hf.config.get_text_config(), "max_position_embeddings", longest)
    if longest > context:
        raise ValueError(f"{model.path}: a sequence of {longest} tokens is longer than its context of {context}")


@torch.no_grad()
def score(model: ScalarModel, sequences: list[list[int]], pack_tokens: int, device: torch.device) -> list[float]:
    """The reward model's number for each of this rank's sequences of token ids (prompt and completion). Collective.

    Raises `ValueError` for a sequence that is longer than the model's context.
    """
    require_context(model, max(map(len, sequences), default=0))
    samples = [at_end(ids) for ids in sequences]
    micro_batches = pack(samples, pack_tokens, device)
    return per_sample(micro_batches, [mb.sequence_sums(model(mb)) for mb in micro_batches], (len(samples),)).tolist()
