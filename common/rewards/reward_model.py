"""Reward models, `--reward model:PATH`: any sequence classifier with one label, with its own tokenizer and template."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch

from common.config.groups import SamplingArgs
from common.data.chat import ChatTemplate, rendered
from common.data.encode import Encoder
from common.data.packing import pack_minibatches, per_sample
from common.data.rows import PROMPT_COLUMNS, require_columns
from common.data.sample import Completion, Group, Sample
from common.data.turns import conversation_of
from common.model.hub import load_tokenizer
from common.model.loading import load_config
from common.model.policy import PackedModel, ScalarModel, load_scalar_model
from common.parallel.distributed import first_line
from common.rewards.processes import Result


class RewardModel:
    """A frozen reward model, sharded over the ranks. Call it with groups of samples; it is collective.

    A model with the policy's vocabulary and chat template reads the policy's token ids. Another one reads the text in
    the tokens of its own tokenizer: the prompt's messages and the completion in its own chat template, or a plain
    prompt and the completion. The reward is its output at the last token or, if rm.py trained it, at the end of the
    turn.
    """

    def __init__(self, flag: str, path: str, args: SamplingArgs, rows: list[dict], tokenizer, device: torch.device):
        """Load the model. Raises `ValueError` naming `flag` if it is no reward model, or has another tokenizer than the
        policy and cannot read these rows."""
        self.flag = f"{flag} {path}"
        self.args, self.device, self.tokenizer = args, device, load_tokenizer(path, flag=flag)
        self.at_end_of_turn = load_config(path).to_dict().get("scored_at") == "end_of_turn"
        ours, theirs = ((each.get_vocab(), each.chat_template) for each in (self.tokenizer, tokenizer))
        self.same = ours == theirs
        if not self.same:
            if args.environment is not None:
                raise ValueError(f"{self.flag}: another tokenizer than --model's, but --environment has no text for it")
            self.column = "_prompt" if "_prompt" in rows[0] else require_columns("--dataset", rows, PROMPT_COLUMNS)[0]
            self.encoder = Encoder(tokenizer, args)
            if self.tokenizer.chat_template is None and isinstance(self.encoder.as_asked(rows[0], self.column), list):
                raise ValueError(f"{self.flag}: prompts are messages, but its tokenizer has no chat template")
            self.chat = ChatTemplate(self.tokenizer) if self.tokenizer.chat_template is not None else None
            self._ids(Completion([], [], text="?", row=rows[0]))  # its template may refuse a system prompt
        self.model = load_scalar_model(path, args, device, trainable=False, flag=flag)

    def __call__(self, groups: list[Group]) -> list[Result]:
        """Return a number for each sample, or an error: it is too long, or the template refuses it."""
        asked = [[self._ids_or_error(sample) for sample in group] for group in groups]
        known = [[ids for ids in group if isinstance(ids, list)] for group in asked]
        numbers = iter(score(self.model, known, self.args.pack_tokens, self.device))
        return [Result(next(numbers)) if isinstance(ids, list) else Result(error=ids) for ids in chain(*asked)]

    def scores(self, groups: list[Group]) -> list[float]:
        """Return the number of each sample. Collective. Raises `ValueError` naming the row of one that has none."""
        results = self(groups)
        for sample, result in zip(chain(*groups), results, strict=True):
            if result.error:
                raise ValueError(f"{sample.row['_source']}: {result.error}")
        return [result.value for result in results]

    def _ids_or_error(self, sample: Completion) -> list[int] | str:
        try:
            ids = sample.ids if self.same else self._ids(sample)
            require_context(self.model, len(ids))
            if len(ids) > self.args.room:
                raise ValueError(f"{self.flag}: a sequence of {len(ids)} tokens is longer than {self.args.room_flags}")
        except ValueError as error:
            return first_line(error)
        return ids

    def _ids(self, sample: Completion) -> list[int]:
        """Return the conversation in this model's tokens. A truncated plain completion has no EOS here either.

        Raises `ValueError` if the chat template refuses it."""
        prompt, end = self.encoder.as_asked(sample.row, self.column), self.tokenizer.eos_token_id
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt + sample.text)["input_ids"]
            ids = ids[:-1] if ids[-1] == end else ids  # some tokenizers append it
            return ids if sample.finish_reason == "length" else ids + [end]
        messages = [*prompt, dict(role="assistant", content=sample.text)]
        if self.at_end_of_turn:
            conversation = conversation_of(self.chat, dict(_source=self.flag), messages, first_trained=len(prompt))
            text = conversation.text[: conversation.turns[-1].end]
        else:
            text = rendered(self.tokenizer, messages, f"{self.flag}: its")
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def short_names(rewards: Sequence[str]) -> dict[str, str]:
    """Return the name of each of `--reward` in metrics: a function's own name; `model` for a model, or, for several,
    `model/` and the shortest ends of their paths that differ."""
    paths = {name: Path(name.removeprefix("model:")).parts for name in rewards if name.startswith("model:")}
    for length in range(1, 1 + max(map(len, paths.values()), default=0)):
        tails = {name: "/".join(parts[-length:]) for name, parts in paths.items()}
        if len(set(tails.values())) == len(paths):
            break
    names = {name: name.rpartition(":")[2] for name in rewards}
    return names | {name: "model" if len(paths) == 1 else f"model/{tails[name]}" for name in paths}


def at_end(ids: list[int], row: dict | None = None) -> Sample:
    """Return a sample whose scalar is read once, after all of `ids`. Streams follow the targets and the last token has
    none, so a token is appended; any will do, because it is never an input."""
    return Sample(ids + ids[-1:], [False] * len(ids) + [True], row=row or {})


def require_context(model: PackedModel, longest: int) -> None:
    """Raise `ValueError` if the longest sequence is longer than the model's context."""
    context = getattr(model.hf.config.get_text_config(), "max_position_embeddings", longest)
    if longest > context:
        raise ValueError(f"{model.path}: a sequence of {longest} tokens is longer than its context of {context}")


@torch.no_grad()
def score(model: ScalarModel, groups: list[list[list[int]]], pack_tokens: int, device: torch.device) -> list[float]:
    """Return the reward of each of this rank's sequences of token ids (prompt and completion), given in groups that may
    share prefixes. Collective.

    Raises `ValueError` for a sequence that is longer than the model's context.
    """
    require_context(model, max(map(len, chain(*groups)), default=0))
    (micro_batches,) = pack_minibatches([[at_end(ids) for ids in group] for group in groups], 1, pack_tokens, device)
    count = sum(map(len, groups))
    return per_sample(micro_batches, [mb.sequence_sums(model(mb)) for mb in micro_batches], (count,)).tolist()
