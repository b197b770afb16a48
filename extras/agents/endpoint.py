"""The endpoint of `--agent`: chat completions over HTTP, on this machine only, in a thread.

The thread checks tokens and reads JSON. Everything else happens in the thread that has the engine,
in a coroutine for each request (agents.py)."""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator

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


OVER = Refusal("api_key: its episode is over", 401)


class Endpoint:
    """HTTP server on a free port of 127.0.0.1."""

    def __init__(self, serve: Callable[[str, dict], Awaitable[dict]]) -> None:
        """`serve(token, body)` returns the answer to a request, or raises `Refusal`. It runs in
        `loop`, which must be set."""
        self.serve = serve
        self.loop: asyncio.AbstractEventLoop
        self.tokens: set[str] = set()  # of the episodes that are played
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
            token, body = self._token(request), await _body(request)
            serving = asyncio.run_coroutine_threadsafe(self.serve(token, body), self.loop)
            answer = await asyncio.wrap_future(serving)
        except Refusal as refusal:
            return JSONResponse(refusal.body, refusal.status)
        except asyncio.CancelledError:
            return JSONResponse(OVER.body, OVER.status)
        if body.get("stream"):
            events = _events(answer, body.get("stream_options"))
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
