"""MCP servers as tools: schemas and results reach the model, a server that hangs or dies costs one
call, and no server outlives its episode."""

import asyncio
import re
import sys
from contextlib import closing

import pytest
import yaml
from helpers import ROOT
from in_process import Args
from processes import PATIENCE, alive, until

from common.config.groups import flags_of
from common.config.parse import one_line
from common.train.checkpoint import model_card
from common.workers.pool import ForkServer, Process
from extras.tools.mcp_tools import mcp_source
from extras.tools.schemas import tool_schemas
from extras.tools.sources import ToolError

# A server without the package, because its import takes a second. Two pages of tools.
PLAIN = """
import json, os, sys

TOOLS = "echo mixed structured failed broken hang die".split()

def result_of(method, params):
    if method == "initialize":
        info = dict(name="plain", version="1")
        version = params["protocolVersion"]
        return dict(protocolVersion=version, capabilities=dict(tools={}), serverInfo=info)
    if method == "tools/list":
        at = int(params.get("cursor", 0))
        schema = dict(type="object", properties=dict(text=dict(type="string")))
        tools = [dict(name=name, inputSchema=schema) for name in TOOLS[at : at + 5]]
        return dict(tools=tools) | (dict(nextCursor="5") if at == 0 else {})
    name = params["name"]
    text = params["arguments"].get("text", str(os.getpid()))
    text = dict(type="text", text=os.path.expandvars(text))
    if name == "mixed":
        image = dict(type="image", data="", mimeType="image/png")
        return dict(content=[text, image, text])
    if name == "structured":
        return dict(content=[], structuredContent=dict(n=1))
    if name == "failed":
        return dict(content=[dict(type="text", text="no such row\\nid 7")], isError=True)
    if name == "broken":
        return dict(content=3)
    if name == "die":
        sys.exit(3)
    return dict(content=[text])

print("this line is no message")
for line in sys.stdin:
    message = json.loads(line)
    method, params = message["method"], message.get("params", {})
    hangs = params.get("name") == "hang"
    if "id" not in message or hangs:
        continue
    answer = dict(jsonrpc="2.0", id=message["id"])
    if method == "server/discover":
        answer["error"] = dict(code=-32601, message="unknown method")
    else:
        answer["result"] = result_of(method, params)
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return the value of --tools that starts the plain server."""
    file = tmp_path_factory.mktemp("mcp") / "plain.py"
    file.write_text(PLAIN)
    return f"mcp:{sys.executable} {file}"


@pytest.fixture
def server(plain):
    server = mcp_source.__wrapped__(plain, PATIENCE)
    yield server
    server.end()


def test_results_become_text(server):
    assert server.names == "echo mixed structured failed broken hang die".split()
    assert server.call("echo", dict(text="é\n<b>")) == "é\n<b>"
    assert server.call("mixed", dict(text="a")) == "a\n[content of type image]\na"
    assert server.call("structured", {}) == '{"n": 1}'
    with pytest.raises(ToolError, match="^no such row\nid 7$"):
        server.call("failed", {})
    with pytest.raises(ToolError, match="^ValidationError: "):
        server.call("broken", {})
    assert server.call("echo", dict(text="on")) == "on"


def test_a_server_that_dies_or_is_late_is_started_anew(server):
    first = server.call("echo", {})
    with pytest.raises(ToolError, match="^MCPError: .*closed; the next call starts the server"):
        server.call("die", {})
    second = server.call("echo", {})
    server.seconds = 0.2
    with pytest.raises(TimeoutError, match="^no answer within 0.2 s; the next call starts the ser"):
        server.call("hang", {})
    server.seconds = PATIENCE
    assert len({first, second, server.call("echo", {})}) == 3


@pytest.mark.parametrize(("command", "words"), [
    ("", "no command"), ("'open", "No closing quotation; quote as in a shell"),
    ("sh -c 'echo no license >&2; exit 3'",
     "the server does not start: MCPError: Connection closed; try the command by hand"),
    (f"{sys.executable} {{}}/none.py", "the server has no tools"),
    (f"{sys.executable} {{}}/endless.py", "its list of tools has more than 100 pages"),
    ("env ONEFILE_KEY", "ONEFILE_KEY is not set here; export it"), ("env PATH A=b", "no command"),
    ("env A=*** x", "the value of A was not stored; export A and write `env A COMMAND`"),
])  # fmt: skip
def test_a_server_without_tools_is_refused(command, words, tmp_path):
    (tmp_path / "none.py").write_text(PLAIN.replace("TOOLS[at : at + 5]", "[]"))
    endless = PLAIN.replace("if at == 0 else {})", "if True else {})")
    (tmp_path / "endless.py").write_text(endless)
    command = command.format(tmp_path)
    with pytest.raises(ValueError, match=f"^--tools mcp:.*: {words}"):
        assert mcp_source(f"mcp:{command}", PATIENCE).names


def test_a_command_that_ends_in_py_is_no_file_of_tools(plain):
    assert plain.endswith(".py")
    args = Args(tools=(plain,), prompt_format="chat", environment_timeout=PATIENCE)
    assert {schema["function"]["name"] for schema in tool_schemas(args)} >= {"echo", "die"}


def test_a_server_that_is_late_at_its_start_is_refused():
    command = f"{sys.executable} -c 'import sys; sys.stdin.read()'"
    with pytest.raises(ValueError, match="does not start: no answer within 0.2 s; try the command"):
        assert mcp_source(f"mcp:{command}", 0.2).names


def test_env_names_variables_that_the_server_inherits(plain, monkeypatch):
    monkeypatch.setenv("ONEFILE_KEY", "s3cret one")
    command = plain.removeprefix("mcp:")
    source = mcp_source(f"mcp:env ONEFILE_KEY other='a b' {command}", PATIENCE)
    source.begin({})
    assert source.call("echo", dict(text="$ONEFILE_KEY, $other, $PATH")).startswith(
        "s3cret one, a b, /"
    )
    source.end()


@pytest.mark.parametrize(("given", "public"), [
    ("mcp:env KEY=s3cret python shop.py", "mcp:env KEY=*** python shop.py"),
    ("mcp:env A='s3cret s3cret' b_2=s3cret=s3cret x", "mcp:env A=*** b_2=*** x"),
    ("mcp:env -i 'KEY=s3cret s3cret' python shop.py", "mcp:env -i KEY=*** python shop.py"),
    ("mcp:docker run -e KEY=s3cret shop", "mcp:docker run -e KEY=*** shop"),
    ("mcp:docker run -eKEY=s3cret --env=B=s3cret x", "mcp:docker run -eKEY=*** --env=B=*** x"),
    ("mcp:sh -c 'export KEY=s3cret; python shop.py'", "mcp:sh -c 'export KEY=***'"),
    ("mcp:env KEY='s3cret", "mcp:env KEY=***"),
    ("mcp:env KEY python 'my shop.py' --size=3", "mcp:env KEY python 'my shop.py' --size=3"),
    ("tools.py:Key", "tools.py:Key"),
])  # fmt: skip
def test_values_of_the_environment_are_neither_stored_nor_shown(given, public, tmp_path):
    """They are secrets: args.yaml, model card, trackers and error lines have `KEY=***`."""
    args = Args(tools=(given,), prompt_format="chat", output_dir=str(tmp_path))
    assert flags_of(args)["tools"] == [public]
    assert yaml.safe_load(model_card(args, 1).decode().split("```")[1][5:])["tools"] == [public]
    with pytest.raises(ValueError) as error:
        Args(tools=(given,), prompt_format="plain")
    assert one_line(error.value).startswith(f"--tools {public} has no effect with --prompt_format")
    again = Args(tools=(given.replace("s3cret", "other"),), prompt_format="chat")
    assert flags_of(again)["tools"] == [public]  # a run may be resumed with another key


def test_errors_of_servers_show_no_values():
    for command in ("/nonexistent", "", "sh -c 'exit 3'", "'open"):
        with pytest.raises(ValueError, match=r"^--tools mcp:env KEY=\*\*\*") as error:
            assert mcp_source(f"mcp:env KEY=s3cret {command}", PATIENCE).names
        assert "s3cret" not in str(error.value)


def test_server_of_the_page(tmp_path):
    """The page writes its server with the package for MCP servers."""
    page = (ROOT / "extras/tools/README.md").read_text(encoding="utf-8")
    (code,) = re.findall("```python\n(from mcp.*?)```", page, re.DOTALL)
    (tmp_path / "shop.py").write_text(code)
    source = mcp_source(f"mcp:{sys.executable} {tmp_path / 'shop.py'}", PATIENCE)
    source.begin({})
    source.tools = source._listed()
    (function,) = (schema["function"] for schema in source.schemas())
    assert function["name"] == "price"
    assert function["description"] == "Return the price of an item."
    assert function["parameters"]["properties"]["item"]["type"] == "string"
    assert function["parameters"]["required"] == ["item"]
    assert source.call("price", dict(item="tea")) == "3"
    with pytest.raises(ToolError, match="item\n *Field required"):
        source.call("price", {})
    source.end()


def test_episodes_have_servers_of_their_own(plain):
    """They end with the process of the episode, whatever has happened to it."""
    settings = dict(tools=[plain], answer_seconds=PATIENCE, unsafe_code_execution=False)
    row = dict(tools=mcp_source(plain, PATIENCE).schemas())
    server = ForkServer("extras.tools.toolbox:load_toolbox", shared=True, argument=settings)
    with closing(server), asyncio.Runner() as loop:

        def ask(process, method, *arguments, seconds=PATIENCE):
            return loop.run(process.call(method, *arguments, seconds=seconds))

        one, other = Process(server), Process(server)
        assert ask(one, "begin", row).error is ask(other, "begin", row).error is None
        pids = [ask(process, "call", "echo", {}).value.text for process in (one, other, one)]
        assert pids[0] == pids[2] != pids[1]
        one.close()
        until(lambda: not alive(int(pids[0])))
        assert ask(other, "call", "hang", {}, seconds=0.2).timed_out
        until(lambda: not alive(int(pids[1])))
