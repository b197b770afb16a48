"""Model cards and the upload: the card tells what the run did, and rank 0 alone uploads, to a
private repository."""

import base64
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from helpers import metrics, run
from huggingface_hub import ModelCard, constants

import sft
from common.config.groups import TrainArgs, flags_of
from common.config.parse import parse
from common.model.hub import resolve_model
from common.parallel import distributed, signals
from common.train.publish import MARK, NOT_SHOWN, card_files, publish
from common.train.run_folder import prepare_output_dir

SHORT = ("--max_steps", 2, "--batch_size", 8, "--eval_size", 16, "--seed", 3)


class Hub(ThreadingHTTPServer):
    """Local stub of the hub. `refuse` maps the end of a path to the status of its answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.created, self.files, self.refuse, self.asked = [], {}, {}, []
        self.address = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply(dict(name="me", orgs=[]))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        path, hub = self.path, self.server
        if path.endswith("/repos/create"):
            hub.created.append(json.loads(body))
            self.reply(dict(url=f"{hub.address}/me/model"))
        elif "/preupload/" in path:
            modes = dict(uploadMode="regular", shouldIgnore=False)
            self.reply(
                dict(files=[dict(path=file["path"]) | modes for file in json.loads(body)["files"]])
            )
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line.get("key") == "file"]
            content = {file["path"]: base64.b64decode(file["content"]) for file in files}
            self.reply(
                dict(commitUrl=f"{hub.address}/me/model/commit/1", commitOid="1" * 40), content
            )

    def reply(self, answer: dict, content: dict[str, bytes] | None = None) -> None:
        """Answer with the status of the path; if it is 200, first store the `content` of a
        commit."""
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        status = next((code for end, code in self.server.refuse.items() if end in self.path), 200)
        text = json.dumps(answer if status == 200 else dict(error="you may not")).encode()
        self.server.files |= content if content and status == 200 else {}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setenv("HF_TOKEN", "hf_stub")
        yield server
        server.shutdown()


def card_of(folder: Path) -> tuple[dict, str, dict]:
    """Return a card's metadata, its text and the flags in it."""
    card = ModelCard.load(folder / "README.md")
    return (
        card.data.to_dict(),
        card.text,
        yaml.safe_load(re.search("```yaml\n(.*?)```", card.text, re.DOTALL)[1]),
    )


def files_in(folder: Path, prefix: str = "") -> dict[str, bytes]:
    return {f"{prefix}{file.name}": file.read_bytes() for file in folder.iterdir()}


# ---- the card ----


def test_card_has_base_licence_flags_and_metrics_but_no_absolute_path(main, small, tmp_path):
    base = shutil.copytree(small[1], tmp_path / "base")
    (base / "README.md").write_text(
        "---\nlicense: apache-2.0\nbase_model: some/origin\n---\nA model.\n"
    )
    main(
        "sft",
        "--model",
        base,
        *small[2:],
        *SHORT,
        "--output_dir",
        tmp_path / "run",
        "--lora_rank",
        2,
    )
    lines = metrics(tmp_path / "run")
    for name, library in (("hf", "transformers"), ("adapter", "peft")):
        data, text, flags = card_of(tmp_path / "run" / name)
        assert (
            data["license"] == "apache-2.0"
            and data["base_model"] == "some/origin"
            and "datasets" not in data
        )
        assert data["library_name"] == library and {"onefile", "sft"} <= {*data["tags"]}
        assert flags["model"] == "base" and flags["lora_rank"] == 2 and str(tmp_path) not in text
        first, last = (
            f"{line['loss']:.4g} (step {line['step']})" for line in (lines[0], lines[-1])
        )
        assert (
            f"| loss | {first} | {last} |" in text
            and "licence: apache-2.0" in text
            and "not evaluated" in text
        )


def test_flags_of_the_card_repeat_the_run(main, sums, tmp_path, monkeypatch):
    monkeypatch.chdir(sums.parent)
    given = [
        "--dataset",
        sums.name,
        *map(str, SHORT),
        "--system_prompt",
        "a: |b|\n`c`",
        "--prompt_format",
        "chat",
    ]
    main("sft", *given, "--output_dir", tmp_path / "run")
    (tmp_path / "flags.yaml").write_text(yaml.safe_dump(card_of(tmp_path / "run" / "hf")[2]))
    again, before = (
        flags_of(parse(sft.Args, flags))
        for flags in (["--config", str(tmp_path / "flags.yaml")], given)
    )
    before["max_length"] = again["max_length"]  # the run has set it
    assert {k: v for k, v in again.items() if k not in NOT_SHOWN} == {
        k: v for k, v in before.items() if k not in NOT_SHOWN
    }


def test_base_and_data_of_the_hub_are_metadata(small, tmp_path, monkeypatch, device):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    args = TrainArgs(
        model="user/base", dataset=("user/rows:0.5", "rows.jsonl:0.5"), output_dir=str(tmp_path)
    )
    model = type("Model", (), dict(path=str(small[1]), device=device, compute_dtype="float32"))()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "README.md").write_bytes(
        card_files(args, model, ("loss",), tmp_path / "hf")["README.md"]
    )
    data, text, _ = card_of(tmp_path / "hf")
    assert (
        data["base_model"] == "user/base"
        and data["datasets"] == ["user/rows"]
        and "license" not in data
    )
    assert "licence: unknown" in text


def test_card_may_be_edited_and_an_edited_one_survives_the_next_export(main, small, tmp_path):
    command = ("sft", *small, *SHORT, "--output_dir", tmp_path)
    main(*command)
    file, first = tmp_path / "hf" / "README.md", (tmp_path / "hf" / "README.md").read_bytes()
    file.write_text(f"{MARK}\nshort\n")
    resolve_model(str(tmp_path / "hf"))  # raises if a file with a checksum was changed
    main(*command)
    assert file.read_bytes() == first
    file.write_text("mine\n")
    main(*command)
    assert file.read_text() == "mine\n"


# ---- the upload ----


@pytest.mark.slow
def test_two_ranks_upload_once(hub, small, tmp_path):
    (tmp_path / "rank.py").write_text(
        "import runpy\nfrom huggingface_hub import constants\n"
        f"constants.ENDPOINT, constants.HF_HUB_OFFLINE = {hub.address!r}, False\n"
        "runpy.run_path('sft.py', run_name='__main__')\n"
    )
    folder = tmp_path / "run"
    done = run(
        2, tmp_path / "rank.py", *small, *SHORT, "--output_dir", folder, "--push_to_hub", "me/model"
    )
    assert hub.files == files_in(folder / "hf") and "model.safetensors" in hub.files
    assert sum("/commit/" in path for path, _ in hub.asked) == 1
    assert done.stdout.count(f"{hub.address}/me/model") == 2  # before training and at the end


def test_adapter_is_uploaded_beside_the_model_to_a_private_repository(hub, main, small, tmp_path):
    main(
        "sft", *small, *SHORT, "--lora_rank", 2, "--output_dir", tmp_path, "--push_to_hub", "model"
    )
    assert hub.files == files_in(tmp_path / "hf") | files_in(tmp_path / "adapter", "adapter/")
    assert all(repository["visibility"] == "private" for repository in hub.created)
    assert {token for _, token in hub.asked} == {"Bearer hf_stub"}


@pytest.mark.parametrize(
    ("name", "refuse", "words"),
    [
        ("me/model", {"whoami": 401}, "Invalid user token"),
        ("me/model", {"create": 403, "/models/me/model": 404}, "you may not"),
        ("other/model", {"auth-check/write": 403}, "you may not"),
        ("a b", {}, "Repo id must use alphanumeric"),
        ("", {}, "Repo id must use alphanumeric"),
        ("a/b/c", {}, "Repo id must be in the form"),
    ],
)
def test_upload_that_the_hub_refuses_ends_the_run_before_it_begins(
    hub, name, refuse, words, tmp_path
):
    hub.refuse = refuse
    with pytest.raises(
        ValueError, match=f"^--push_to_hub {name}: cannot upload: .*{words}"
    ) as error:
        prepare_output_dir(TrainArgs(output_dir=str(tmp_path / "run"), push_to_hub=name))
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_missing_token_offline_mode_and_lost_network_are_one_line_each(hub, monkeypatch, tmp_path):
    args = TrainArgs(output_dir=str(tmp_path), push_to_hub="me/model")
    assert publish(args) is None
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "refused" in publish(args)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in publish(args)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "absent"))
    assert "hf auth login" in publish(args)


def test_failed_upload_loses_nothing_and_the_same_command_repeats_it(hub, main, small, tmp_path):
    command = ("sft", *small, *SHORT, "--output_dir", tmp_path, "--push_to_hub", "me/model")
    hub.refuse = {"/commit/": 403}
    with pytest.raises(
        distributed.RunError,
        match=f"you may not; later: hf upload me/model {tmp_path}/hf . --private",
    ):
        main(*command)
    assert hub.files == {} and resolve_model(str(tmp_path / "hf"))
    hub.refuse, lines = {}, metrics(tmp_path)
    main(*command)
    assert hub.files == files_in(tmp_path / "hf") and metrics(tmp_path) == lines


def test_stopped_run_is_not_uploaded(hub, main, small, tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "received", 15)
    main("sft", *small, *SHORT, "--output_dir", tmp_path, "--push_to_hub", "me/model")
    assert (tmp_path / "hf").is_dir() and len(hub.created) == 1 and hub.files == {}
