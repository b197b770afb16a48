"""The endpoint of `--agent`, on this machine only: chat completions, and dialects (dialects.py).

It runs in the event loop of the episodes: the coroutine that handles a request also waits for its
turn from the engine."""

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Container, Iterator
from functools import partial

from aiohttp import web

from common.text.messages import messages_field
from common.workers.worker import one_line
from extras.agents.dialects import BILLING, DIALECTS, Refusal, of_messages, stream

LARGEST = 1 << 22  # bytes of a request
STRANGERS = 1024  # connections that sent no key yet; beyond these, the oldest one is closed
MODEL = "policy"
SOURCE = "the request"  # in errors, in place of the source of a data row
QUIET = logging.Logger(__name__, logging.CRITICAL)  # no log of what clients send wrongly

# Parameters of a request that are read, or that change nothing.
NAMES = ("model", "messages", "tools", "stream", "stream_options", "user", "metadata", "store",
         "max_tokens", "max_completion_tokens", "max_output_tokens", "parallel_tool_calls",
         "cache_control", "client_metadata", "diagnostics", "inference_geo", "prompt_cache_key",
         "prompt_cache_retention", "safety_identifier", "service_tier", "speed")  # fmt: skip
# Parameters that are ignored: the run's flags say how to sample and to think, as training requires.
IGNORED = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
           "frequency_penalty", "thinking", "reasoning", "output_config", "text",
           "context_management", "is_error", BILLING)  # fmt: skip
# Parameters that may only have these values.
ONLY = dict(n=[1], tool_choice=["auto", dict(type="auto")], response_format=[dict(type="text")],
            truncation=["disabled"], include=[["reasoning.encrypted_content"]])  # fmt: skip
COUNT = "/v1/messages/count_tokens"
FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


class Endpoint:
    """An HTTP server on a free port of 127.0.0.1."""

    def __init__(
        self, serve: Callable[..., Awaitable[dict]], count: Callable[..., int],
        keys: Container[str],
    ):  # fmt: skip
        """`serve(key, body, read)` returns the answer to a request; `read` translates its body.
        `count(key, request)` returns its number of tokens. Both raise `Refusal`. `keys`: the API
        keys of the running episodes."""
        self.serve = serve
        self.count = count
        self.keys = keys
        self.known: set[asyncio.BaseProtocol] = set()  # connections with a key
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"

    async def run(self) -> None:
        """Serve until the task of this coroutine is cancelled."""
        loop = asyncio.get_running_loop()
        make = partial(web.BaseRequest, loop=loop, client_max_size=LARGEST)
        self.server = web.Server(self._answer, request_factory=make, logger=QUIET, access_log=None)
        listening = await loop.create_server(self._connect, sock=self.listener, backlog=1024)
        try:
            await asyncio.Event().wait()
        finally:
            listening.close()
            await self.server.shutdown(0)

    def close(self) -> None:
        self.listener.close()

    def _connect(self) -> asyncio.BaseProtocol:
        living = self.server.connections  # the oldest first
        self.known &= {*living}
        strangers = [each for each in living if each not in self.known and each.transport]
        for oldest in strangers[: max(0, len(strangers) + 1 - STRANGERS)]:
            oldest.force_close()
        return self.server()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        try:
            return await self._respond(request)
        except Refusal as refused:
            refusal = refused
        except web.HTTPRequestEntityTooLarge:
            refusal = Refusal(f"the request has more than {LARGEST} bytes", 413)
        except Exception as error:  # the request comes from the user's code
            refusal = Refusal(one_line(error))
        return web.json_response(refusal.body, status=refusal.status)

    async def _respond(self, request: web.BaseRequest) -> web.Response:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = bearer if bearer in self.keys else request.headers.get("x-api-key")
        if key not in self.keys:
            raise Refusal("api_key: of no episode in progress", 401)
        self.known.add(request.protocol)
        path = request.path.replace("/v1/v1/", "/v1/")  # clients of Messages add a /v1
        if (request.method, path) == ("GET", "/v1/models"):
            return web.json_response(dict(object="list", data=[dict(id=MODEL, object="model")]))
        if request.method != "POST" or path not in ("/v1/chat/completions", COUNT, *DIALECTS):
            raise Refusal(f"{request.method} {request.path}: there is no such page", 404)
        body = json.loads(await request.read())
        if not isinstance(body, dict):
            raise Refusal("the request is not a JSON object")
        if path == COUNT:
            return web.json_response(dict(input_tokens=self.count(key, of_messages(body))))
        read, write, events = DIALECTS.get(path, (dict, dict, None))
        answer = write(await self.serve(key, body, read))
        if not body.get("stream"):
            return web.json_response(answer)
        chunks = _events(answer, body.get("stream_options"))
        text = "".join(chunks if events is None else stream(events(answer)))
        return web.Response(text=text, content_type="text/event-stream")


def _events(answer: dict, options: object) -> Iterator[str]:
    """Yield the events that stream a completion: message, end and, with `include_usage`, usage."""
    (choice,) = answer["choices"]
    calls = enumerate(choice["message"].get("tool_calls") or [])
    delta = choice["message"] | dict(tool_calls=[dict(index=i) | call for i, call in calls] or None)
    ended = dict(index=0, delta={}, finish_reason=choice["finish_reason"])
    parts = [dict(choices=[dict(index=0, delta=delta, finish_reason=None)]), dict(choices=[ended])]
    if isinstance(options, dict) and options.get("include_usage"):
        parts.append(dict(choices=[], usage=answer["usage"]))
    for part in parts:
        chunk = answer | dict(object="chat.completion.chunk", usage=None) | part
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


# ---- the body of a request ----


def ignored_parameters(body: dict) -> list[str]:
    """Return which parameters have no effect. Raises `Refusal` for one that would change the
    answer."""
    absent = ("None", "False", "[]", "{}")
    given = {name: value for name, value in body.items() if repr(value) not in absent}
    for name, value in given.items():
        if name not in NAMES + IGNORED and value not in ONLY.get(name, ()):
            raise Refusal(f"{name} {value!r:.50}: not supported; leave it out")
    return [name for name in IGNORED if name in given]


def messages_of(body: dict) -> list[dict]:
    """Return the messages of a request in one form, without fields that clients add."""
    messages = messages_field(dict(_source=SOURCE, messages=body.get("messages")), "messages")
    if not messages:
        raise Refusal("messages: expected a list of messages")
    if messages[-1]["role"] == "assistant":
        raise Refusal("messages: the last one is the model's; a turn cannot be continued")
    if any("images" in message for message in messages):
        raise Refusal("messages: an image: not supported; give text")
    names = {}  # id of a call -> name of its function
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id")] = call["function"]["name"]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]  # templates may read it
    return [{name: message[name] for name in FIELDS if name in message} for message in messages]


def tools_of(body: dict) -> list[dict]:
    """Return the schemas of a request's tools."""
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise Refusal("tools: expected a list of schemas")
    return tools


def limit_of(body: dict, most: int) -> int:
    """Return how many tokens a turn may have: as many as the request asks for, or else `most`."""
    names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
    limits = (*map(body.get, names), most)
    limit = next(limit for limit in limits if limit is not None)
    if type(limit) is not int or limit < 1:
        raise Refusal(f"max_tokens {limit!r:.50}: must be a positive integer")
    return limit


def continues(history: list[dict], messages: list[dict]) -> bool:
    """Return whether `messages` are `history`, as it was served, and then messages of others."""
    new = messages[len(history) :]
    if not history or not new or any(message["role"] == "assistant" for message in new):
        return False
    return [*map(_compared, history)] == [*map(_compared, messages[: len(history)])]


def _compared(message: dict) -> list:
    calls = [(call.get("id"), call["function"]) for call in message.get("tool_calls", ())]
    return [message["role"], message["content"], message.get("tool_call_id"), calls]


def written(message: dict) -> dict:
    """Return a message of the model as the API writes it: arguments are JSON text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"] | dict(arguments=json.dumps(call["function"]["arguments"]))
        calls.append(call | dict(function=function))
    return message | dict(tool_calls=calls)
