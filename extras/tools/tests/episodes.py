"""An episode with calls beside the same conversation in sft.py."""

from pathlib import Path

from text.chats import parts

from common.config.online import SamplingArgs
from common.text.encode import Encoder
from extras.tools.parser import Parser, make_parser
from extras.tools.turns import reply_ids

# a file with tools
FILE = '''
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: first number
        b: second number
    """
    return a + b


def helper(x):
    return x


def _private():
    """Not a tool."""


class Shelf:
    def reset(self, row):
        self.items = [row["first"]]

    def put(self, item: str) -> list:
        """Put an item on the shelf.

        Args:
            item: its name
        """
        self.items.append(item)
        return self.items

    def close(self):
        pass
'''


def written(folder: Path) -> Path:
    """Write the file with tools."""
    file = folder / "my_tools.py"
    file.write_text(FILE)
    return file


def make_args(**flags: object) -> SamplingArgs:
    """Return flags with tools, whose files need not exist."""
    defaults = dict(model="tiny", tools=("python",), prompt_format="chat", reward=("exact_match",))
    return SamplingArgs(**defaults | flags)


def parser_of(tokenizer) -> Parser | None:
    """Return the default parser of a tokenizer's template; None if the template is refused."""
    try:
        return make_parser(tokenizer, make_args())
    except ValueError:
        return None


def call(name: str, arguments: dict) -> dict:
    return dict(type="function", id="call00000", function=dict(name=name, arguments=arguments))


def assert_episode_equals_sft(
    encoder: Encoder, parser: Parser, row: dict, silent: set[int]
) -> None:
    """Require that prompt, sampled turns and replies are the ids of the sft row `messages`: a
    question, a turn with calls, their results and an answer. If the template rewrites the turn, so
    that there are two sequences, the second one's prompt has the text of the reply. `silent`:
    tokens that end turns."""
    asked, called, *results, _ = row["messages"]
    first, *later = encoder.sft(row, ("messages",))
    (_, prompt), (_, turn), *rest = parts(first)
    assert prompt == [*encoder.prompt(dict(row, prompt=[asked]), ("prompt",))]
    text = encoder.tokenizer.decode([token for token in turn if token not in silent])
    read = parser.parse(text, row["tools"], encoder.tokenizer.decode(prompt[-32:]))
    wanted = [one["function"] for one in called["tool_calls"]]
    assert [(one.name, one.arguments) for one in read.calls] == [
        (function["name"], function["arguments"]) for function in wanted
    ]
    reply = reply_ids(encoder, row, read.calls, [result["content"] for result in results])
    if later:
        ((_, told), (_, answer)) = parts(later[0])
        decode = encoder.tokenizer.decode
        assert len(later) == 1 and not rest and decode(told).endswith(decode(reply))
    else:
        ((_, told), (_, answer)) = rest
        assert told == reply
    assert answer
