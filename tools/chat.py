"""Chat with a model in the terminal; a second model may answer beside it.

    python tools/chat.py --model runs/sft/hf --system_prompt 'Be brief.' python tools/chat.py
    --model Qwen/Qwen3-0.6B --adapter runs/grpo/adapter --compare Qwen/Qwen3-0.6B echo 247+5= |
    python tools/chat.py --model runs/grpo/hf

Each line of the input is a turn of a conversation. Without a chat template the model continues each
line by itself. /reset starts over, /system TEXT also sets the system prompt, /image FILE attaches
an image to the next line, /image lists the images, /quit or Ctrl-D ends, Ctrl-C stops an answer.
With --environment each line is the prompt of an episode, in which the environment answers the
model. docs/after.md"""

import argparse
import contextlib
import io
import itertools
import json
import math
import re
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn
from transformers import GenerationConfig, TextStreamer
from transformers.utils import logging

from common.config.extra import extra
from common.config.groups import BaseArgs
from common.config.parse import one_line
from common.config.training import LoRAArgs
from common.data.encode import Encoder
from common.data.tasks import TASKS
from common.model import lora
from common.model.hub import eos_token_ids, load_tokenizer, recorded_format, resolve_model
from common.model.loading import load_config, named_errors, open_model
from common.parallel import distributed
from common.parallel.process import print_any_text, visible
from common.rollout.environments import ENVIRONMENTS, load_environment
from tools.options import Options

COMMANDS = "the commands are /reset, /system TEXT, /image FILE and /quit"
TURNS = 8  # of the model in an episode, as the default of --max_turns


def note(text: str) -> None:
    print(visible(f"[{text}]"), file=sys.stderr, flush=True)


def merge_adapter(hf: nn.Module, folder: str, model: str) -> None:
    """Merge the adapter in `folder`, of a run or of the PEFT library. Raises `ValueError` if it
    does not fit."""
    try:
        args = LoRAArgs(adapter=folder)
    except ValueError as error:
        raise ValueError(one_line(error)) from error
    with named_errors(f"--adapter {folder} does not fit --model {model}"):
        lora.add_adapters(hf, args, f"--model {model}")
        stored = lora.read_adapter(hf, args)
    for name, layer in lora.layers_of(hf).items():
        a_RI, b_OR = (stored[f"{name}.lora_{which}"].to(layer.weight) for which in "AB")
        plain = nn.Linear(layer.in_features, layer.out_features, device="meta")
        plain.weight, plain.bias = (
            nn.Parameter(lora.merge(layer.weight, a_RI, b_OR, layer.scale)),
            layer.bias,
        )
        hf.set_submodule(name, plain)


def chat_images():
    """Return the module for images, which is loaded if there is one."""
    with extra("images", "/image"):
        from tools import chat_images
    return chat_images


def has_images(prompt: str | list[dict]) -> bool:
    """Return whether a conversation has images, of which `/image` makes parts of messages."""
    return isinstance(prompt, list) and any(isinstance(m["content"], list) for m in prompt)


class Printer(TextStreamer):
    """Streamer that prints an answer without the tokens that end it, and keeps its text."""

    def __init__(self, tokenizer, ends: list[int]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.ends, self.text = {*ends} & {*tokenizer.added_tokens_decoder}, ""

    def put(self, value) -> None:
        if self.next_tokens_are_prompt or int(value) not in self.ends:
            super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        super().on_finalized_text(visible(text), stream_end)


class Speaker:
    """Model with its conversation."""

    def __init__(self, flag: str, model: str, options: argparse.Namespace):
        """Load the model. Raises `ValueError` that names the flag."""
        self.name, self.options, self.messages, path = (
            model,
            options,
            [],
            resolve_model(model, flag),
        )
        if (
            options.prompt_format == "auto"
            and recorded_format(path) == "plain"
            and not options.environment
        ):
            note(
                f"{model} was trained on plain text: it continues each line; for turns: "
                "--prompt_format chat"
            )
            options.prompt_format = "plain"
        kwargs = dict(
            system_prompt=options.system_prompt or None,
            template_kwargs=tuple(options.template_kwargs),
        )
        self.flag, self.path = flag, path
        self.tokenizer, config = load_tokenizer(path, flag=flag), load_config(path)
        kwargs |= dict(prompt_format=options.prompt_format)
        self.flags = kwargs
        self.encoder = Encoder(self.tokenizer, BaseArgs(**kwargs))
        self.ends = eos_token_ids(path, self.tokenizer, options.prompt_format)
        self.context = getattr(config.get_text_config(), "max_position_embeddings", math.inf)
        is_text = "text_config" not in config.sub_configs
        if is_text and config.architectures and "CausalLM" not in config.architectures[0]:
            raise ValueError(f"{flag} {model}: {config.architectures[0]} is not a language model")
        if options.environment and self.encoder.chat is None:
            raise ValueError(
                f"--environment {options.environment} needs a chat template; {model} has none"
            )
        device, dtype = (
            ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
        )
        with named_errors(f"{flag} {model}"):
            self.hf = open_model(path, dtype).to(device).eval()
        if options.adapter is not None and flag == "--model":
            merge_adapter(self.hf, options.adapter, model)
        self.hf.generation_config = (
            GenerationConfig()
        )  # without top-k and penalties, as in training

    @torch.no_grad()
    def answer(self, row: dict) -> tuple[str, bool]:
        """Print the answer to the column `prompt`, text or messages. Return it and whether Ctrl-C
        stopped it."""
        row = row | dict(_source="the conversation")
        if has_images(row["prompt"]):
            row = chat_images().as_row(row)
            if self.encoder.images is None:
                self.reader()  # names the model, if it reads no images
                args = chat_images().ChatArgs(
                    vision="frozen", max_pixels=self.options.max_pixels, **self.flags
                )
                self.encoder = Encoder(self.tokenizer, args)
        prompt = self.encoder.prompt(row, ("prompt",))
        if (room := self.context - len(prompt)) < 1:
            problem = (
                f"{len(prompt)} tokens do not fit in the context of {self.name}, {self.context}"
            )
            raise ValueError(f"{problem}; the line is dropped, /reset starts over")
        limit, temperature = min(self.options.max_new_tokens, room), self.options.temperature
        sampling = (
            dict(do_sample=True, temperature=temperature, top_k=0)
            if temperature
            else dict(do_sample=False)
        )
        ends, images = self.ends, {}
        if row.get("images"):
            reader = self.reader()
            images = chat_images().inputs_of(row, prompt, reader, self.hf.device)
            ends = [*ends, *reader.placeholder_ids]  # as in training: they have no image
        ids, printer = (
            torch.tensor([prompt], device=self.hf.device),
            Printer(self.tokenizer, ends),
        )
        sampling |= dict(
            max_new_tokens=limit,
            eos_token_id=ends,
            pad_token_id=ends[0],
            streamer=printer,
        )
        try:
            out = self.hf.generate(ids, attention_mask=torch.ones_like(ids), **sampling, **images)
        except KeyboardInterrupt:
            printer.end()
            note("stopped")
            return printer.text, True
        if out.shape[1] == len(prompt) + limit and out[0, -1] not in ends:
            note(
                f"cut off after {limit} tokens" + (": the context is full" if limit == room else "")
            )
        return printer.text, False

    def reader(self):
        """Return the reader of images. Raises `ValueError` for a model without one."""
        with extra("images", "/image"):
            from extras.images.reader import reader
        try:
            return reader(self.path, self.options.max_pixels)
        except ValueError as error:
            named = str(error).replace(f"--model {self.path}", f"{self.flag} {self.name}")
            raise ValueError(named) from error

    def read(self, line: str, row: dict, images: list[str]) -> None:
        """Obey a command, play an episode, or answer a line with attached `images`: within the
        conversation if there is a chat template."""
        if (command := line.strip()) == "/reset" or command.startswith("/system "):
            self.messages = []
            self.encoder.system_prompt = command[8:] or self.encoder.system_prompt
            return
        if self.options.compare is not None:
            print(visible(f"{self.name}:"), flush=True)
        if self.options.environment:
            return self.play(row)
        content = chat_images().in_message(line, images) if images else line
        messages = [*self.messages, dict(role="user", content=content)]
        alone = dict(prompt=line, images=images)  # without a chat template
        text, _ = self.answer(dict(prompt=messages) if self.encoder.chat else alone)
        self.messages = [*messages, dict(role="assistant", content=text)]

    def play(self, row: dict) -> None:
        """Play an episode of at most `TURNS` turns, with the prompt and the other columns of
        `row`."""
        environment, total = load_environment(self.options.environment)(), 0.0
        messages = environment.reset(dict(row))
        for turn in range(1, TURNS + 1):
            text, stopped = self.answer(row | dict(prompt=messages))
            if stopped:
                return
            replies, reward, done = environment.step(text)
            total += reward
            messages = [*messages, dict(role="assistant", content=text), *replies]
            for reply in replies:
                print(visible(f"{reply['role']}: {reply['content']}"), flush=True)
            if done:
                return note(f"the episode ends after {turn} turns with reward {total:g}")
        note(f"the episode does not end within {TURNS} turns")


def read_options() -> argparse.Namespace:
    """Return the options. Exits with one line if one is wrong."""
    parser = Options(__doc__)
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="folder, checkpoint or Hugging Face id; tiny: the built-in model",
    )
    add(
        "--adapter",
        help="adapter to merge into --model: the adapter/ of a run, or one of the PEFT library",
    )
    add("--compare", metavar="MODEL", help="second model, which answers after the first one")
    add("--system_prompt", "--system", help="system turn of the conversation")
    add(
        "--temperature",
        type=float,
        default=0.7,
        help="sampling temperature, 0: greedy; default: 0.7",
    )
    add("--max_new_tokens", type=int, default=512, help="maximum tokens of an answer; default: 512")
    add("--environment", help=f"{', '.join(ENVIRONMENTS)} or file.py:Class")
    add(
        "--row",
        type=json.loads,
        help="columns of the environment's row, as JSON; default: rows of the built-in task",
    )
    add(
        "--prompt_format",
        choices=("auto", "chat", "plain"),
        default="auto",
        help="default: as in training",
    )
    add(
        "--template_kwargs",
        nargs="*",
        default=(),
        metavar="NAME=VALUE",
        help="variables for the chat template",
    )
    add("--max_pixels", type=int, help="maximum pixels of an image; give that of the training")
    add("--seed", type=int, default=0, help="seed of the answers, the same for both models")
    options = parser.parse_args()
    if not 0 <= options.temperature < math.inf or options.max_new_tokens < 1:
        parser.error("--temperature must be finite and at least 0, --max_new_tokens at least 1")
    if options.row is not None and not (isinstance(options.row, dict) and options.environment):
        parser.error("--row must be a JSON object, and needs --environment")
    if options.max_pixels is not None and options.max_pixels < 1:
        parser.error(f"--max_pixels {options.max_pixels}: must be greater than 0")
    return options


def attach(command: str, speakers: list[Speaker], attached: dict[str, str]) -> None:
    """Obey `/image`: add a file to `attached`, which has the copies by name, or list the images."""
    name = command[len("/image") :].strip()
    if name and speakers[0].options.environment:
        note("/image: the prompts of an environment have no images")
    elif name:
        try:
            for speaker in speakers:
                speaker.reader()
            attached[name] = chat_images().attach(name)
        except ValueError as error:
            note(distributed.first_line(error))
            return
        note(f"{name}: attached to the next line, {len(attached)} in all")
    else:
        sent = len(chat_images().images_in(speakers[0].messages))
        names = ", ".join(attached) or "none"
        note(f"attached to the next line: {names}; in the conversation so far: {sent}")


def load(options: argparse.Namespace) -> list[Speaker]:
    """Load the models. Exits with one line if an option is wrong."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    named = (("--model", options.model), ("--compare", options.compare))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # answers alone go to stdout
            if options.environment is not None:
                load_environment(options.environment)
            return [Speaker(flag, model, options) for flag, model in named if model is not None]
    except (ValueError, RuntimeError) as error:  # RuntimeError: weights of other shapes
        distributed.fail(" ".join(one_line(error).split()))


def main() -> None:
    print_any_text()
    options = read_options()
    speakers = load(options)
    rows = TASKS.get(options.environment, lambda _: [{}])("test")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    attached: dict[str, str] = {}
    for number in itertools.count():
        line = input(
            "> " if sys.stdin.isatty() else ""
        )  # spaces at the end belong to a plain prompt
        if (command := line.strip()) == "/quit":
            break
        if command.split()[:1] == ["/image"]:
            attach(command, speakers, attached)
            continue
        if (
            re.fullmatch(r"/[a-z]+", command.split(" ")[0])
            and command != "/reset"
            and command[:8] != "/system "
        ):
            note(COMMANDS)
            continue
        row = (options.row or rows[number % len(rows)]) | (dict(prompt=line) if command else {})
        answered = bool(command)
        for speaker in speakers if command or (options.environment and "prompt" in row) else ():
            torch.manual_seed(distributed.fold_seed(options.seed, number))
            try:
                speaker.read(line, row, [*attached.values()])
            except (
                Exception
            ) as error:  # of the template, the environment or the memory: the chat goes on
                note(f"{type(error).__name__}: {distributed.first_line(error)}")
                answered = False
        if answered:
            attached = {}


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` may close the pipe
    with contextlib.suppress(EOFError, KeyboardInterrupt):  # Ctrl-D, or Ctrl-C at the prompt
        main()
