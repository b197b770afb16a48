"""The endpoint of `--agent`: chat completions over HTTP, on this machine only, in a thread.

The thread checks tokens and reads JSON. Everything else happens in the thread that has the engine
(agents.py), which takes `calls` and answers each."""

import asyncio
import json
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

LARGEST = 1 << 24  # bytes of a request
MODEL = "policy"


class Refusal(ValueError):
    """Reason why a request has no completion, in the form of the API."""

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        kind = "authentication_error" if status == 401 else "invalid_request_error"
        self.body = dict(error=dict(message=message, type=kind, param=None, code=code))


@dataclass(eq=False)
class Call:
    """A request for a completion, which waits for its answer."""

    token: str
    """of the episode"""
    body: dict
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()

    def answer(self, answer: dict | Refusal) -> None:
        """Send a completion, or a refusal. From any thread."""
        self.loop.call_soon_threadsafe(self.future.set_result, answer)


class Endpoint:
    """HTTP server on a free port of 127.0.0.1."""

    def __init__(self) -> None:
        self.tokens: set[str] = set()  # of the episodes that are played
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        app = Starlette(routes=routes)
        config = uvicorn.Config(
            app, loop="asyncio", ws="none", lifespan="off", log_config=None, access_log=False,
            timeout_keep_alive=3600,  # a client fails if its connection closes as it sends
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        sockets = dict(sockets=[listener])
        self.thread = threading.Thread(target=self.server.run, kwargs=sockets, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(1.0)
        self.server.force_exit = True  # without waiting for the last connections
        self.thread.join()

    async def _complete(self, request: Request) -> Response:
        try:
            call = Call(self._token(request), await _body(request))
        except Refusal as refusal:
            return JSONResponse(refusal.body, refusal.status)
        self.calls.put(call)
        answer = await call.future
        if isinstance(answer, Refusal):
            return JSONResponse(answer.body, answer.status)
        if call.body.get("stream"):
            events = _events(answer, call.body.get("stream_options"))
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(answer)

    async def _models(self, request: Request) -> Response:
        try:
            self._token(request)
        except Refusal as refusal:
            return JSONResponse(refusal.body, refusal.status)
        return JSONResponse(dict(object="list", data=[dict(id=MODEL, object="model")]))

    def _token(self, request: Request) -> str:
        """Return the token of a request. Raises `Refusal` unless its episode is played."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in self.tokens:
            raise Refusal("api_key: not that of an episode that is played", 401)
        return token


async def _body(request: Request) -> dict:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > LARGEST:
            raise Refusal(f"the request has more than {LARGEST} bytes", 413)
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
