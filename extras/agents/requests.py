"""The body of a request to the endpoint of `--agent`: its messages, tools and parameters."""

import json

from common.data.messages import messages_field
from extras.agents.endpoint import Refusal

SOURCE = "the request"  # in place of a data row
# Parameters that are read, or change nothing.
NAMES = ("model", "messages", "tools", "stream", "stream_options", "user", "metadata", "store",
         "max_tokens", "max_completion_tokens", "parallel_tool_calls")  # fmt: skip
# Parameters of sampling, which are those of the run.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
            "frequency_penalty")  # fmt: skip
# Parameters with a single value that is possible.
ONLY = dict(n=1, tool_choice="auto", response_format=dict(type="text"))
FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


def ignored_parameters(body: dict, temperature: float) -> list[str]:
    """Return the parameters of a request that have no effect; `temperature`: that of the run.
    Raises `Refusal` for one that would change the answer."""
    absent = ("None", "False", "[]", "{}")
    given = {name: value for name, value in body.items() if repr(value) not in absent}
    for name, value in given.items():
        if name not in NAMES + SAMPLING and ONLY.get(name) != value:
            raise Refusal(f"{name} {value!r:.50}: not supported; leave it out")
    same = given.get("temperature") == temperature
    return [name for name in SAMPLING if name in given and not (same and name == "temperature")]


def messages_of(body: dict) -> list[dict]:
    """Return the messages of a request in one form, without the fields that clients add."""
    messages = messages_field(dict(_source=SOURCE, messages=body.get("messages")), "messages")
    if not messages:
        raise Refusal("messages: expected a list of messages")
    if messages[-1]["role"] == "assistant":
        raise Refusal("messages: the last one is the model's; a turn cannot be continued")
    names = {}  # of the functions that calls name
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id")] = call["function"]["name"]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]  # which templates may read
    return [{name: message[name] for name in FIELDS if name in message} for message in messages]


def tools_of(body: dict) -> list[dict]:
    """Return the schemas of a request."""
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise Refusal("tools: expected a list of schemas")
    return tools


def written(message: dict) -> dict:
    """Return a message of the model as the API writes it: arguments are JSON."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"] | dict(arguments=json.dumps(call["function"]["arguments"]))
        calls.append(call | dict(function=function))
    return message | dict(tool_calls=calls)


def limit_of(body: dict, most: int) -> int:
    """Return the maximum length of a turn: that of the request, or `most`."""
    limits = (body.get("max_completion_tokens"), body.get("max_tokens"), most)
    limit = next(limit for limit in limits if limit is not None)
    if type(limit) is not int or limit < 1:
        raise Refusal(f"max_tokens {limit!r:.50}: must be a positive integer")
    return limit


def continues(history: list[dict], messages: list[dict]) -> bool:
    """Return whether messages are a history and new ones that are not the model's."""
    new = messages[len(history) :]
    if not history or not new or any(message["role"] == "assistant" for message in new):
        return False
    return [*map(_compared, history)] == [*map(_compared, messages[: len(history)])]


def _compared(message: dict) -> list:
    """Return what of a message must be as it was served."""
    calls = [(call.get("id"), call["function"]) for call in message.get("tool_calls", ())]
    return [message["role"], message["content"], message.get("tool_call_id"), calls]
