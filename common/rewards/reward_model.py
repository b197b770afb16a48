"""Rewards that are models: `--reward model:PATH`, any sequence classifier with one label; and the
judges (extras/judges), which `load_model` also loads. A model is sharded over the ranks, so all
ranks call it together."""

from collections.abc import Callable
from itertools import chain

import torch

from common.config.flags import MODEL_KINDS
from common.config.online import SamplingArgs
from common.model.hub import resolve_model
from common.model.loading import load_config
from common.model.policy import load_scalar_model
from common.model.scoring import require_length, score
from common.packs.sample import Completion, Group
from common.parallel.distributed import first_line
from common.rewards.registry import load_judges
from common.text.chat import ChatTemplate, rendered
from common.text.columns import PROMPT_COLUMNS, choose_columns
from common.text.encode import Encoder
from common.text.tokenizer import eos_token_ids, load_tokenizer
from common.text.turns import template_form, turns_of
from common.workers.worker import Result


def load_model(
    flag: str, name: str, args: SamplingArgs, rows: list[dict], tokenizer,
    device: torch.device | None,
) -> Callable[[list[Group]], list[Result]] | None:  # fmt: skip
    """Load the model of `--reward`: the reward model `model:PATH`, or the judge `judge:PATH` or
    `rank:PATH`. Without a device only check the flags and return None. Collective. Raises
    `ValueError` as `RewardModel` and `Judge` do."""
    kind = name.partition(":")[0] if name.startswith(MODEL_KINDS) else "model"
    folder = resolve_model(path_of(name), flag, weights=device is not None)
    if kind == "model":
        return None if device is None else RewardModel(flag, folder, args, rows, tokenizer, device)
    judges = load_judges(f"{flag} {name}")
    judge = judges.Judge(flag, kind, folder, args, rows, tokenizer, device)
    return None if device is None else judge


def path_of(name: str | None) -> str | None:
    """Return the path of a reward model or judge, which `model:`, `judge:` or `rank:` may
    precede."""
    return name.partition(":")[2] if name and name.startswith(MODEL_KINDS) else name


class RewardModel:
    """A frozen reward model, sharded over the ranks. Call it with groups of samples. Collective.

    If it has the policy's vocabulary and chat template, it reads the policy's token ids. Otherwise
    the text is tokenised again: the prompt's messages and the completion in the chat template of
    the reward model, or a plain prompt and the completion. The reward is its output at the last
    token, or at the end of the turn if rm.py trained it."""

    def __init__(
        self, flag: str, path: str, args: SamplingArgs, rows: list[dict], policy_tokenizer,
        device: torch.device,
    ):  # fmt: skip
        """Load the model. Raises `ValueError` naming `flag` if it is no reward model, or if it
        cannot read these rows because its tokenizer differs from the policy's."""
        self.flag = f"{flag} {path}"
        self.args = args
        self.device = device
        self.tokenizer = load_tokenizer(path, flag=flag)
        self.at_end_of_turn = load_config(path).to_dict().get("scored_at") == "end_of_turn"
        self.reads_policy_ids = (
            self.tokenizer.get_vocab() == policy_tokenizer.get_vocab()
            and self.tokenizer.chat_template == policy_tokenizer.chat_template
        )
        # After a stop string the token ids have the string and no EOS; the text has neither, so it
        # is read instead. Episodes have no text.
        self.reads_stopped_text = bool(args.stop) and not args.has_turns
        self.ends = eos_token_ids(path, self.tokenizer)
        if self.reads_stopped_text or not self.reads_policy_ids:
            self._prepare_text(rows, policy_tokenizer)
        self.model = load_scalar_model(path, args, device, trainable=False, flag=flag)

    def _prepare_text(self, rows: list[dict], policy_tokenizer) -> None:
        if self.args.has_turns:
            problem = "another tokenizer than --model's cannot read completions of several turns"
            raise ValueError(f"{self.flag}: {problem}")
        self.column = "_prompt"
        if "_prompt" not in rows[0]:
            self.column = choose_columns("--dataset", rows, PROMPT_COLUMNS)[0]
        self.encoder = Encoder(policy_tokenizer, self.args)
        self.chat = None
        if self.tokenizer.chat_template is not None:
            self.chat = ChatTemplate(self.tokenizer)
        elif isinstance(self.encoder.as_asked(rows[0], self.column), list):
            problem = "prompts are messages, but its tokenizer has no chat template"
            raise ValueError(f"{self.flag}: {problem}")
        self._ids(Completion([], [], text="?", row=rows[0]))  # the template may refuse the prompt

    def __call__(self, groups: list[Group]) -> list[Result]:
        """Return a number for each sample. A sample that is too long, or that the chat template
        refuses, gets an error instead."""
        ids_or_errors = [[self._ids_or_error(sample) for sample in group] for group in groups]
        usable = [[ids for ids in group if isinstance(ids, list)] for group in ids_or_errors]
        numbers = iter(score(self.model, usable, self.args.pack_tokens))
        return [
            Result(next(numbers)) if isinstance(ids, list) else Result(error=ids)
            for ids in chain(*ids_or_errors)
        ]

    def _ids_or_error(self, sample: Completion) -> list[int] | str:
        try:
            is_cut = sample.finish_reason == "stop" and sample.ids[-1] not in self.ends
            reads_ids = self.reads_policy_ids and not (is_cut and self.reads_stopped_text)
            ids = [*sample.ids] if reads_ids else self._ids(sample)
            require_length(self.model, len(ids))
            limit = self.args.pack_limit
            if len(ids) > limit.tokens:
                problem = f"a sequence of {len(ids)} tokens is longer than {limit.flag}"
                raise ValueError(f"{self.flag}: {problem}")
        except ValueError as error:
            return first_line(error)
        return ids

    def _ids(self, sample: Completion) -> list[int]:
        """Return prompt and completion in the tokens of this model. A plain completion that was cut
        at the length limit gets no EOS. Raises `ValueError` if the chat template refuses it."""
        prompt = self.encoder.as_asked(sample.row, self.column)
        if isinstance(prompt, str):
            end = self.tokenizer.eos_token_id
            ids = self.tokenizer(prompt + sample.text)["input_ids"]
            ids = ids[:-1] if ids[-1] == end else ids  # some tokenizers append it
            return ids if sample.finish_reason == "length" else ids + [end]
        messages = [*prompt, dict(role="assistant", content=sample.text)]
        if self.at_end_of_turn:
            row, messages = template_form(self.chat, dict(_source=self.flag), messages)
            ((said,), _) = turns_of(self.chat, row, messages, first_trained=len(prompt))
            text = said.prompt + said.text
        else:
            text = rendered(self.tokenizer, messages, f"{self.flag}: its")
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
