"""An agent of the tests: it holds a conversation in a dialect of the endpoint, over HTTP or with an
official client, whole or as a stream."""

import json

import httpx


class Chat:
    page = "/chat/completions"

    def __init__(self, row: dict):
        self.messages = [dict(role="system", content="".join(row["system"]))]
        tools = [dict(type="function", function=function) for function in row["functions"]]
        self.body = dict(model="a", messages=self.messages, tools=tools)

    def say(self, text: str) -> None:
        self.messages.append(dict(role="user", content=text))

    def answer(self, key: str, text: str) -> None:
        self.messages.append(dict(role="tool", tool_call_id=key, content=text))

    def heard(self, answer: dict) -> list[tuple]:
        """Remember the model's turn. Return its calls."""
        message = answer["choices"][0]["message"]
        self.messages.append(message)
        calls = message.get("tool_calls") or []
        assert (answer["choices"][0]["finish_reason"] == "tool_calls") == bool(calls)
        return [
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in calls
        ]

    def joined(self, events: list[dict]) -> dict:
        first, end = events
        choice = dict(
            message=first["choices"][0]["delta"], finish_reason=end["choices"][0]["finish_reason"]
        )
        return dict(choices=[choice])


class Messages:
    page = "/messages"
    client = None

    def __init__(self, row: dict):
        self.number = 0
        self.messages = []
        tools = [
            dict(name=f["name"], description=f["description"], input_schema=f["parameters"],
                 cache_control=dict(type="ephemeral"))
            for f in row["functions"]
        ]  # fmt: skip
        self.body = dict(model="claude-opus-5", max_tokens=1000, messages=self.messages,
                         tools=tools, metadata=dict(user_id="me"),
                         thinking=dict(type="adaptive"), tool_choice=dict(type="auto"),
                         output_config=dict(effort="high"))  # fmt: skip
        self.system = [
            dict(type="text", text=text, cache_control=dict(type="ephemeral"))
            for text in row["system"]
        ]

    def say(self, text: str) -> None:
        self.number += 1
        bill = dict(type="text", text=f"x-anthropic-billing-header: cch={self.number};")
        self.body["system"] = [bill, *self.system]
        text = dict(type="text", text=text, cache_control=dict(type="ephemeral"))
        for message in self.messages:  # the mark of the cache moves on
            for block in message["content"]:
                block.pop("cache_control", None)
        self.messages.append(dict(role="user", content=[text]))

    def answer(self, key: str, text: str) -> None:
        result = dict(type="tool_result", tool_use_id=key, content=text)
        self.messages.append(dict(role="user", content=[result]))

    def heard(self, answer: dict) -> list[tuple]:
        self.messages.append(dict(role="assistant", content=answer["content"]))
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert (answer["stop_reason"] == "tool_use") == bool(calls)
        return [(call["id"], call["name"], call["input"]) for call in calls]

    def joined(self, events: list[dict]) -> dict:
        message = events[0]["message"]
        for event in events:
            match event["type"]:
                case "content_block_start":
                    assert event["index"] == len(message["content"])
                    message["content"].append(event["content_block"])
                    said = ""
                case "content_block_delta":
                    said += event["delta"].get("text") or event["delta"].get("partial_json", "")
                case "content_block_stop":
                    block = message["content"][event["index"]]
                    is_text = block["type"] == "text"
                    block |= dict(text=said) if is_text else dict(input=json.loads(said))
                case "message_delta":
                    message |= event["delta"] | dict(usage=event["usage"])
        assert events[-1]["type"] == "message_stop"
        return message

    async def by_client(self, base_url: str, api_key: str) -> dict:
        import anthropic

        self.client = self.client or anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key)
        names = ("model", "messages", "system", "tools")
        request = {name: self.body[name] for name in names}
        tokens = await self.client.messages.count_tokens(**request)
        async with self.client.messages.stream(**self.body) as events:
            answer = await events.get_final_message()
        assert answer.usage.input_tokens == tokens.input_tokens
        return answer.model_dump(exclude_none=True)


class Responses:
    page = "/responses"
    client = None

    def __init__(self, row: dict):
        self.input = []
        tools = [dict(type="function", strict=True, **function) for function in row["functions"]]
        self.body = dict(model="gpt-5-codex", input=self.input, tools=tools, store=False,
                         include=["reasoning.encrypted_content"])  # fmt: skip
        self.body["instructions"] = "".join(row["system"])

    def say(self, text: str) -> None:
        content = [dict(type="input_text", text=text)]
        self.input.append(dict(type="message", role="user", content=content))

    def answer(self, key: str, text: str) -> None:
        self.input.append(dict(type="function_call_output", call_id=key, output=text))

    def heard(self, answer: dict) -> list[tuple]:
        self.input += answer["output"]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        return [(call["call_id"], call["name"], json.loads(call["arguments"])) for call in calls]

    def joined(self, events: list[dict]) -> dict:
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        answer = events[-1]["response"]
        said = ["" for _ in answer["output"]]
        for event in events:
            if event["type"].endswith(".delta"):
                said[event["output_index"]] += event["delta"]
            if event["type"] == "response.output_item.done":
                assert event["item"] == answer["output"][event["output_index"]]
        assert said == [
            item["arguments"] if "arguments" in item else item["content"][0]["text"]
            for item in answer["output"]
        ]
        return answer

    async def by_client(self, base_url: str, api_key: str) -> dict:
        import openai

        self.client = self.client or openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        async with self.client.responses.stream(**self.body) as events:
            answer = await events.get_final_response()
        return answer.model_dump(exclude_none=True)


SPEAKERS = dict(chat=Chat, messages=Messages, responses=Responses)


async def play(row: dict, base_url: str, api_key: str) -> float:
    speaker = SPEAKERS[row["dialect"]](row)
    texts = iter(row["asks"])
    speaker.say(next(texts))
    turns = 0
    while True:
        if row["way"] == "client":
            answer = await speaker.by_client(base_url, api_key)
        else:
            answer = await by_http(speaker, base_url, api_key, row["way"] == "stream")
        turns += 1
        calls = speaker.heard(answer)
        for key, name, arguments in calls:
            speaker.answer(key, f"{name} {json.dumps(arguments)}")
        if not calls:
            text = next(texts, None)
            if text is None:
                return turns
            speaker.say(text)


async def by_http(speaker, base_url: str, api_key: str, stream: bool) -> dict:
    name = "x-api-key" if speaker.page == "/messages" else "authorization"
    headers = {name: api_key if name == "x-api-key" else f"Bearer {api_key}"}
    options = dict(headers=headers, timeout=None, verify=False)
    async with httpx.AsyncClient(base_url=base_url, **options) as client:
        answer = await client.post(speaker.page, json=speaker.body | dict(stream=stream))
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if "data: " in line]
    return speaker.joined([json.loads(line) for line in lines if line != "[DONE]"])
