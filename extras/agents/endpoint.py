"""The endpoint of `--agent`: chat completions over HTTP, on this machine only.

It runs in the event loop of the episodes: the handler of a request is the coroutine that awaits its
turn from the engine."""

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Container, Iterator

from aiohttp import web

from common.rewards.worker import one_line

LARGEST = 1 << 22  # bytes of a request
STRANGERS = 1024  # connections that have sent no key yet
LOOKS = 10  # seconds for a connection to send one
MODEL = "policy"
QUIET = logging.Logger(__name__, logging.CRITICAL)  # a client may send anything


class Refusal(ValueError):
    """Reason why a request has no completion, in the form of the API."""

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        kind = "authentication_error" if status == 401 else "invalid_request_error"
        self.body = dict(error=dict(message=message, type=kind, param=None, code=code))


class Closed(asyncio.Protocol):
    """A connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class Endpoint:
    """HTTP server on a free port of 127.0.0.1."""

    def __init__(self, serve: Callable[[str, dict], Awaitable[dict]], keys: Container[str]):
        """`serve(key, body)` returns the answer to a request, or raises `Refusal`. `keys`: those of
        the episodes that are played."""
        self.serve = serve
        self.keys = keys
        self.strangers: dict[asyncio.BaseProtocol, int] = {}  # connections -> looks at them
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"

    async def run(self) -> None:
        """Serve until this is cancelled."""
        loop = asyncio.get_running_loop()

        def request_of(message, payload, protocol, writer, task) -> web.BaseRequest:
            parts = message, payload, protocol, writer, task
            return web.BaseRequest(*parts, loop, client_max_size=LARGEST)

        self.server = web.Server(
            self._answer, request_factory=request_of, logger=QUIET, access_log=None
        )
        listening = await loop.create_server(self._connect, sock=self.listener, backlog=1024)
        try:
            while True:
                await asyncio.sleep(1)
                for connection, looks in [*self.strangers.items()]:
                    self.strangers[connection] += 1
                    if looks == LOOKS:
                        del self.strangers[connection]
                        connection.force_close()
        finally:
            listening.close()
            await self.server.shutdown(0)

    def close(self) -> None:
        self.listener.close()

    def _connect(self) -> asyncio.BaseProtocol:
        if len(self.strangers) == STRANGERS:
            return Closed()
        connection = self.server()
        self.strangers[connection] = 0
        return connection

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
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key not in self.keys:
            raise Refusal("api_key: not that of an episode that is played", 401)
        self.strangers.pop(request.protocol, None)
        match request.method, request.path:
            case "GET", "/v1/models":
                return web.json_response(dict(object="list", data=[dict(id=MODEL, object="model")]))
            case "POST", "/v1/chat/completions":
                body = _object_of(await request.read())
                answer = await self.serve(key, body)
                if not body.get("stream"):
                    return web.json_response(answer)
                events = "".join(_events(answer, body.get("stream_options")))
                return web.Response(text=events, content_type="text/event-stream")
        raise Refusal(f"{request.method} {request.path}: there is no such page", 404)


def _object_of(data: bytes) -> dict:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal("the request is not a JSON object")
    return body


def _events(answer: dict, options: object) -> Iterator[str]:
    """Yield a completion as the events of a stream: the message, its end and, with the option
    `include_usage`, its usage."""
    (choice,) = answer["choices"]
    calls = enumerate(choice["message"].get("tool_calls") or [])
    delta = choice["message"] | dict(tool_calls=[dict(index=i) | call for i, call in calls] or None)
    ended = dict(index=0, delta={}, finish_reason=choice["finish_reason"])
    parts = [
        dict(choices=[dict(index=0, delta=delta, finish_reason=None)]),
        dict(choices=[ended]),
    ]
    if isinstance(options, dict) and options.get("include_usage"):
        parts.append(dict(choices=[], usage=answer["usage"]))
    for part in parts:
        chunk = answer | dict(object="chat.completion.chunk", usage=None) | part
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"
