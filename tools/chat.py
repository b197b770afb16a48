"""Chat with a model in the terminal (docs/after.md).

    python tools/chat.py --model runs/sft/hf --system_prompt 'Be brief.'
    python tools/chat.py --model Qwen/Qwen3-0.6B --adapter runs/grpo/adapter \\
        --template_kwargs enable_thinking=false
    echo 247+5= | python tools/chat.py --model runs/demo/grpo/hf

Each line of input is a turn of the conversation; a model of plain text continues each line by
itself. /reset starts over. /system TEXT starts over with another system prompt. /image FILE
attaches an image to the next line. /quit or Ctrl-D ends, Ctrl-C stops an answer."""

import argparse
import contextlib
import io
import math
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from pydantic.dataclasses import dataclass
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, TextStreamer
from transformers.utils import logging

from common.config.flags import STRICT
from common.config.groups import BaseArgs, ImageArgs, LoRAArgs
from common.config.options import Options
from common.config.parse import one_line
from common.model import lora
from common.model.hub import GENERATION_CONFIG, fields_of, resolve_model
from common.model.loading import named_errors, open_model
from common.parallel.process import fail, first_line, print_any_text, visible
from common.text.encode import Encoder
from common.text.tokenizer import eos_token_ids, load_tokenizer

COMMANDS = "the commands are /reset, /system TEXT, /image FILE and /quit"


@dataclass(config=STRICT)
class PromptArgs(ImageArgs, BaseArgs):
    """Flags that the encoder of prompts reads, as in training"""


class Printer(TextStreamer):
    """Prints an answer while it is generated, without the tokens that end it; keeps its text."""

    def __init__(self, tokenizer, ends: list[int]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.ends = ends
        self.text = ""

    def put(self, value) -> None:
        if self.next_tokens_are_prompt or int(value) not in self.ends:
            super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        super().on_finalized_text(visible(text), stream_end)


def note(text: str) -> None:
    print(visible(f"[{text}]"), file=sys.stderr, flush=True)


def merge_adapter(model: nn.Module, folder: str) -> None:
    """Merge the adapter in `folder` into the model. It may be of a run or of the PEFT library."""
    args = LoRAArgs(adapter=folder)
    linear = dict(model.named_modules())
    lora.add_adapters(model, args)
    stored = lora.read_adapter(model, folder)
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, lora.LoRALinear):
            a_LI, b_OL = (stored[f"{name}.lora_{which}"] for which in "AB")
            linear[name].weight.data = lora.merge(layer.weight, a_LI, b_OL, layer.scale)
            model.set_submodule(name, linear[name])


def load(options: argparse.Namespace) -> tuple[nn.Module, Encoder, PromptArgs]:
    """Return the model, the encoder of its prompts, and the encoder's flags."""
    path = resolve_model(options.model)
    trained_on = fields_of(path, GENERATION_CONFIG).get("prompt_format")
    if options.prompt_format == "auto" and trained_on == "plain":
        note("trained on plain text, it continues each line; for turns: --prompt_format chat")
        options.prompt_format = "plain"
    args = PromptArgs(
        system_prompt=options.system_prompt,
        prompt_format=options.prompt_format,
        template_kwargs=tuple(options.template_kwargs),
        max_pixels=options.max_pixels,
    )
    tokenizer = load_tokenizer(path)
    encoder = Encoder(tokenizer, args, image_args=args)
    has_cuda = torch.cuda.is_available()
    with named_errors(f"--model {options.model}"):
        model = open_model(path, torch.bfloat16 if has_cuda else torch.float32)
    if options.adapter is not None:
        merge_adapter(model, options.adapter)
    ends = eos_token_ids(path, tokenizer, options.prompt_format)
    sampling = dict(do_sample=True, temperature=options.temperature, top_k=0)
    # As in training: the top-k and the penalties in the model's own file are not used.
    model.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=ends[0], **(sampling if options.temperature else {})
    )
    return model.to("cuda" if has_cuda else "cpu").eval(), encoder, args


@torch.no_grad()
def answer(model: PreTrainedModel, encoder: Encoder, row: dict, max_new_tokens: int) -> str:
    """Print the answer to the row's `prompt` token by token, and return it."""
    prompt = [*encoder.prompt(row, ("prompt",))]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    limit = min(max_new_tokens, context - len(prompt))
    if limit < 1:
        problem = f"{len(prompt)} tokens do not fit in the context of {context}"
        raise ValueError(f"{problem}; the line is dropped, /reset starts over")
    ends = model.generation_config.eos_token_id
    ids = torch.tensor([prompt])
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    if row.get("_images"):
        reader = encoder.images.reader
        pixels = [reader.pixels(image.file, image.digest) for image in row["_images"]]
        inputs |= reader.generation_arguments(pixels, ids)
        ends = [*ends, *reader.placeholder_ids]  # as in training: an answer has no images
    inputs = {name: x.to(model.device) for name, x in inputs.items()}
    printer = Printer(encoder.tokenizer, ends)
    try:
        out = model.generate(**inputs, eos_token_id=ends, max_new_tokens=limit, streamer=printer)
        if out.shape[1] == len(prompt) + limit and out[0, -1] not in ends:
            note(f"cut off after {limit} tokens")
    except KeyboardInterrupt:
        printer.end()
        note("stopped")
    return printer.text


def read_options() -> argparse.Namespace:
    parser = Options(__doc__)
    add = parser.add_argument
    add("--model", required=True, help="folder, checkpoint, Hugging Face id or built-in model")
    add("--adapter", help="adapter to merge into it: adapter/ of a run, or one of the PEFT library")
    add("--system_prompt", help="system turn of the conversation")
    add("--temperature", type=float, default=0.7, help="0: greedy; default: 0.7")
    add("--max_new_tokens", type=int, default=512, help="maximum of an answer; default: 512")
    formats = ("auto", "chat", "plain")
    add("--prompt_format", choices=formats, default="auto", help="default: as in training")
    kwargs = dict(nargs="*", default=(), metavar="NAME=VALUE")
    add("--template_kwargs", **kwargs, help="variables for the chat template")
    add("--max_pixels", type=int, help="maximum pixels of an image; give that of the training")
    options = parser.parse_args()
    if not 0 <= options.temperature < math.inf or options.max_new_tokens < 1:
        parser.error("--temperature must be finite and at least 0, --max_new_tokens at least 1")
    return options


def main() -> None:
    print_any_text()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options = read_options()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # answers alone go to stdout
            model, encoder, args = load(options)
    except ValueError as error:
        fail(one_line(error))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    messages, images = [], []  # images that belong to the next line
    while True:
        # Spaces at the end belong to a plain prompt.
        line = input("> " if sys.stdin.isatty() else "")
        command, _, text = line.strip().partition(" ")
        try:
            if command == "/quit":
                return
            elif command in ("/reset", "/system"):
                prompt = text if command == "/system" and text else args.system_prompt
                changed = replace(args, system_prompt=prompt)
                encoder, args = Encoder(encoder.tokenizer, changed, image_args=changed), changed
                messages, images = [], []
            elif command == "/image":
                changed = replace(args, vision="frozen")
                encoder, args = Encoder(encoder.tokenizer, changed, image_args=changed), changed
                image = Path(os.path.expanduser(text)).resolve()
                if not image.is_file():
                    raise ValueError(f"/image {text}: no such file")
                images.append(str(image))
                note(f"attached to the next line: {', '.join(images)}")
            elif re.fullmatch("/[a-z]+", command):
                note(COMMANDS)
            elif command:
                row = dict(prompt=line, images=images, _source="the conversation", _folder="/")
                if encoder.chat:
                    parts = [dict(type="image", image=image) for image in images]
                    content = [*parts, dict(type="text", text=line)]
                    row |= dict(prompt=[*messages, dict(role="user", content=content)], images=[])
                images = []  # also if there is no answer
                text = answer(model, encoder, row, options.max_new_tokens)
                if encoder.chat:
                    messages = [*row["prompt"], dict(role="assistant", content=text)]
        except Exception as error:  # a template refuses, memory is short: the chat goes on
            note(f"{type(error).__name__}: {first_line(error)}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` may close the pipe
    with contextlib.suppress(EOFError, KeyboardInterrupt):  # Ctrl-D, or Ctrl-C at the prompt
        main()
