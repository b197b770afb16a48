"""The dialects that agents speak: Anthropic's Messages (Claude Code) and OpenAI's Responses
(Codex). Requests are translated to chat completions, and answers back. Fields without a translation
keep their names; endpoint.py then reports or refuses them."""

import json
import re
from collections.abc import Iterable, Iterator

BILLING = "x-anthropic-billing-header"  # Claude Code's prompt has such a line, new in each request
STOPS = dict(stop="end_turn", length="max_tokens", tool_calls="tool_use")


class Refusal(ValueError):
    """Why a request gets no completion, in a form that the clients of all dialects can read."""

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        kind = "authentication_error" if status == 401 else "invalid_request_error"
        error = dict(message=message, type=kind, param=None, code=code)
        self.body = dict(type="error", error=error)


def stream(events: Iterable[tuple[str, dict]]) -> Iterator[str]:
    """Write events, each a type and fields, as server-sent events. Responses numbers them."""
    for number, (name, fields) in enumerate(events):
        event = dict(type=name, sequence_number=number) | fields
        yield f"event: {name}\ndata: {json.dumps(event)}\n\n"


def of_messages(body: dict) -> dict:
    """Translate a request of Messages to one for a chat completion."""
    system = [part["text"] for part in _texts(body.get("system"))]
    shown = [re.sub(rf"\A{BILLING}.*\n?", "", text) for text in system]
    messages = [dict(role="system", content="".join(shown))] if any(shown) else []
    for turn in body["messages"]:
        _add(messages, turn["role"], turn["content"])
    said = dict(
        messages=messages, tools=[*map(_tool, body.get("tools") or [])],
        response_format=(body.get("output_config") or {}).get("format"),
        is_error=any(message.get("is_error") for message in messages),
    )  # fmt: skip
    return body | said | {"system": None, BILLING: shown != system}


def _add(messages: list[dict], role: str, content: str | list) -> None:
    """Add a turn to the messages of a chat: text; calls, in the form of Messages or Responses; and
    results of calls, each as a message of its own."""
    texts, calls, results = [], [], []
    for block in [dict(type="text", text=content)] if isinstance(content, str) else content:
        match block["type"]:
            case "tool_use" | "function_call":
                arguments = block.get("input", block.get("arguments"))
                function = dict(name=block["name"], arguments=arguments)
                key = block.get("call_id", block.get("id"))
                calls.append(dict(id=key, type="function", function=function))
            case "tool_result" | "function_call_output":
                key, said = block.get("tool_use_id", block.get("call_id")), block.get("output")
                result = dict(role="tool", tool_call_id=key, is_error=block.get("is_error"))
                results.append(result | dict(content=_texts(block.get("content", said))))
            case _:
                texts += _texts([block])
    messages += results
    if calls and not texts and messages and messages[-1]["role"] == role:
        messages[-1]["tool_calls"] += calls
    elif texts or calls or not results:
        messages.append(dict(role=role, content=texts, tool_calls=calls))


def _texts(content: str | list | None) -> list[dict]:
    """Return a text, or blocks of text, as parts of a message."""
    parts = [dict(type="text", text=content)] if isinstance(content, str) else content or []
    for part in parts:
        if part["type"] not in ("text", "input_text", "output_text"):
            raise Refusal(f"content of type {part['type']}: not supported; give text and calls")
    return [dict(type="text", text=part["text"]) for part in parts]


def _tool(tool: dict) -> dict:
    schema = tool.get("input_schema", tool.get("parameters"))
    if schema is None:
        raise Refusal(f"tools: {tool.get('type')} has no schema; give tools that the agent runs")
    keys = ("name", "description", "input_examples")
    function = {key: tool[key] for key in keys if tool.get(key) is not None}
    return dict(type="function", function=function | dict(parameters=schema))


def as_message(answer: dict) -> dict:
    """Translate a chat completion to an answer of Messages."""
    (choice,) = answer["choices"]
    text, calls = choice["message"]["content"], choice["message"].get("tool_calls", [])
    content = [dict(type="text", text=text)] if text or not calls else []
    for call in calls:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        content.append(dict(type="tool_use", id=call["id"], name=name, input=arguments))
    usage = answer["usage"]
    usage = dict(input_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"])
    return dict(id=answer["id"], type="message", role="assistant", model=answer["model"],
                content=content, stop_reason=STOPS[choice["finish_reason"]], stop_sequence=None,
                usage=usage)  # fmt: skip


def message_events(message: dict) -> Iterator[tuple[str, dict]]:
    """Yield the events that stream a message. Each of its blocks comes whole."""
    yield "message_start", dict(message=message | dict(content=[], stop_reason=None))
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            begun, delta = dict(text=""), dict(type="text_delta", text=block["text"])
        else:
            text = json.dumps(block["input"])
            begun, delta = dict(input={}), dict(type="input_json_delta", partial_json=text)
        yield "content_block_start", dict(index=index, content_block=block | begun)
        yield "content_block_delta", dict(index=index, delta=delta)
        yield "content_block_stop", dict(index=index)
    ended = dict(stop_reason=message["stop_reason"])
    yield "message_delta", dict(delta=ended, usage=message["usage"])
    yield "message_stop", {}


def of_responses(body: dict) -> dict:
    """Translate a request of Responses to one for a chat completion, by way of Messages."""
    items = body["input"]
    items = [dict(role="user", content=items)] if isinstance(items, str) else items
    turns = [x if "role" in x else dict(role="assistant", content=[x]) for x in items]
    said = dict(system=body.get("instructions"), messages=turns, output_config=body.get("text"))
    chat = of_messages(body | said)
    return chat | dict(instructions=None, input=None, output_config=None)


def as_response(answer: dict) -> dict:
    """Translate a chat completion to an answer of Responses."""
    message = as_message(answer)
    is_cut = message["stop_reason"] == "max_tokens"
    status = "incomplete" if is_cut else "completed"
    output = []
    for number, block in enumerate(message["content"]):
        if block["type"] == "text":
            part = dict(type="output_text", text=block["text"], annotations=[])
            item = dict(type="message", role="assistant", content=[part])
        else:
            said = dict(name=block["name"], arguments=json.dumps(block["input"]))
            item = dict(type="function_call", call_id=block["id"]) | said
        output.append(item | dict(id=f"{message['id']}-{number}", status=status))
    usage = dict(total_tokens=answer["usage"]["total_tokens"], **message["usage"],
                 input_tokens_details=dict(cached_tokens=0, cache_write_tokens=0),
                 output_tokens_details=dict(reasoning_tokens=0))  # fmt: skip
    return dict(id=message["id"], object="response", created_at=answer["created"],
                model=message["model"], output=output, status=status, error=None, usage=usage,
                incomplete_details=dict(reason="max_output_tokens") if is_cut else None,
                tools=[], tool_choice="auto", parallel_tool_calls=True)  # fmt: skip


def response_events(response: dict) -> Iterator[tuple[str, dict]]:
    """Yield the events that stream a response. Each of its items comes whole."""
    begun = dict(status="in_progress", output=[], usage=None, incomplete_details=None)
    yield "response.created", dict(response=response | begun)
    for index, item in enumerate(response["output"]):
        begun = dict(content=[]) if item["type"] == "message" else dict(arguments="")
        begun = item | begun | dict(status="in_progress")
        yield "response.output_item.added", dict(output_index=index, item=begun)
        place = dict(output_index=index, item_id=item["id"])
        for number, part in enumerate(item.get("content", ())):
            at = place | dict(content_index=number)
            yield "response.content_part.added", at | dict(part=part | dict(text=""))
            yield "response.output_text.delta", at | dict(delta=part["text"], logprobs=[])
            yield "response.output_text.done", at | dict(text=part["text"], logprobs=[])
            yield "response.content_part.done", at | dict(part=part)
        if arguments := item.get("arguments"):
            yield "response.function_call_arguments.delta", place | dict(delta=arguments)
            yield "response.function_call_arguments.done", place | dict(arguments=arguments)
        yield "response.output_item.done", dict(output_index=index, item=item)
    yield f"response.{response['status']}", dict(response=response)


# path -> functions that translate a request, its answer, and its answer as a stream
DIALECTS = {
    "/v1/messages": (of_messages, as_message, message_events),
    "/v1/responses": (of_responses, as_response, response_events),
}
