"""`--tools mcp:"command args"`: the tools of a server, a program that speaks the Model Context
Protocol over stdin and stdout. Each episode starts a server of its own, from its own process."""

import json
import logging
import math
import os
import re
import resource
import shlex
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import cache, cached_property

import anyio
from anyio.from_thread import start_blocking_portal
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT, Tool

from common.config.flags import HIDDEN, public
from common.workers.worker import one_line
from extras.tools.sources import ToolError

PAGES = 100  # most pages of a server's list of tools
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*|[A-Za-z_]\w*=.*", re.DOTALL)  # after env: KEY, key=value
logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it reports each line that is no message


class McpTools:
    """The tools of a server, with the methods of `Functions`. The server starts when it is first
    asked, and again after it has ended. The event loop that talks to it runs in a thread."""

    def __init__(self, label: str, command: list[str], environment: dict[str, str], seconds: float):
        """`seconds`: time limit of the start and of each answer."""
        self.label = label
        self.command = command
        self.environment = environment
        self.seconds = seconds
        self.stack = ExitStack()  # closing it ends the server
        self.client: Client | None = None  # None while it does not run

    @cached_property
    def tools(self) -> list[Tool]:
        """All tools, which the server lists before it is ended again. Raises `ValueError`."""
        try:
            tools = self._listed()
        except (ToolError, TimeoutError) as error:
            raise ValueError(f"{self.label}: {error}; try the command by hand") from error
        finally:
            self.end()
        if not tools:
            raise ValueError(f"{self.label}: the server has no tools")
        return tools

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.tools]

    def schemas(self) -> list[dict]:
        """Return their JSON schemas, as the server wrote them."""
        functions = [
            dict(name=t.name, description=t.description or "", parameters=t.input_schema)
            for t in self.tools
        ]
        return [dict(type="function", function=function) for function in functions]

    def begin(self, row: dict) -> None:
        """Do nothing: an episode without calls needs no server."""

    def _listed(self) -> list[Tool]:
        tools: list[Tool] = []
        cursor = None
        for _ in range(PAGES):
            page = self._ask("list_tools", cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise ToolError(f"its list of tools has more than {PAGES} pages")

    def call(self, name: str, arguments: dict) -> str:
        """Return the result of a tool as text. Raises `ToolError`, or `TimeoutError`."""
        result = self._ask("call_tool", name=name, arguments=arguments)
        text = "\n".join(
            content.text if content.type == "text" else f"[content of type {content.type}]"
            for content in result.content
        )
        if result.is_error:
            raise ToolError(text)
        if not result.content and result.structured_content is not None:
            return json.dumps(result.structured_content, ensure_ascii=False)
        return text

    def end(self) -> None:
        """End the server, which has two seconds to end by itself."""
        self.stack.close()
        self.client = None

    def _ask(self, method: str, **arguments):
        """Return the result of a method of the client. Close a server that ended or is late."""
        if self.client is None:
            self._start()

        async def answer():
            with anyio.fail_after(self.seconds):
                return await getattr(self.client, method)(**arguments)

        try:
            return self.portal.call(answer)
        except Exception as error:  # an answer may break the protocol in any way
            problem = one_line(error)
            code = error.code if isinstance(error, MCPError) else None
            is_late = isinstance(error, TimeoutError) or code == REQUEST_TIMEOUT
            if is_late:
                problem = f"no answer within {self.seconds:g} s"
            if is_late or code == CONNECTION_CLOSED:
                problem += "; the next call starts the server anew"
                self.end()
            raise (TimeoutError if is_late else ToolError)(problem) from error

    def _start(self) -> None:
        # what servers print to stderr would fill the terminal
        log = self.stack.enter_context(open(os.devnull, "w"))
        name, *args = self.command
        parameters = StdioServerParameters(command=name, args=args, env=self.environment)
        transport = stdio_client(parameters, errlog=log)
        client = Client(transport, read_timeout_seconds=self.seconds, cache=None)
        try:
            self.portal = self.stack.enter_context(start_blocking_portal())
            connecting = self.portal.wrap_async_context_manager(started(client, self.seconds))
            with without_memory_limit():  # the server would inherit it
                self.client = self.stack.enter_context(connecting)
        except Exception as error:  # of the system or of the protocol, or groups of them
            cause = error
            while isinstance(cause, ExceptionGroup):
                cause = cause.exceptions[0]
            self.end()
            is_late = isinstance(cause, TimeoutError)
            problem = f"no answer within {self.seconds:g} s" if is_late else one_line(cause)
            kind = TimeoutError if is_late else ToolError
            raise kind(f"the server does not start: {problem}") from error


@asynccontextmanager
async def started(client: Client, seconds: float) -> AsyncIterator[Client]:
    """Connect a client while the context lasts. Raises `TimeoutError`."""
    with anyio.fail_after(seconds) as limit:
        async with client:
            limit.deadline = math.inf
            yield client


@contextmanager
def without_memory_limit() -> Iterator[None]:
    """Lift the limit of the address space: some runtimes (Node) reserve much of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@cache
def mcp_source(spec: str, seconds: float) -> McpTools:
    """Return the source `mcp:"command args"`. Raises `ValueError` if there is no command, or a
    variable of `env` has no value."""
    label = f"--tools {public(spec)}"
    try:
        command = shlex.split(spec.removeprefix("mcp:"))
    except ValueError as error:
        raise ValueError(f"{label}: {error}; quote as in a shell") from error
    command, environment = split_environment(label, command)
    if not command:
        raise ValueError(f"{label}: no command; write mcp:'command arguments'")
    return McpTools(label, command, environment, seconds)


def split_environment(label: str, words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and the variables of `env KEY OTHER=value command`. A variable without a
    value has the one that it has here; so no file of a run contains it."""
    for word in words:
        if word.endswith(f"={HIDDEN}"):
            name = re.split(r"[\s=]", word)[-2]
            advice = f"export {name} and write `env {name} COMMAND`"
            raise ValueError(f"{label}: the value of {name} was not stored; {advice}")
    variables: dict[str, str] = {}
    if words[:1] == ["env"] and len(words) > 1 and VARIABLE.fullmatch(words[1]):
        words = words[1:]
        while words and VARIABLE.fullmatch(words[0]):
            name, has_value, value = words[0].partition("=")
            if not has_value and name not in os.environ:
                raise ValueError(f"{label}: {name} is not set here; export it")
            variables[name] = value if has_value else os.environ[name]
            words = words[1:]
    return words, variables
