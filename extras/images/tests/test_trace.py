"""Images in traces and in the viewer."""

import json
import threading
import urllib.request

import pytest

from extras.images.tests.checkpoints import picture

trace_file = pytest.importorskip("extras.trace.file")
from extras.trace import view  # noqa: E402
from extras.trace.tests.test_view import CHROMIUM, dom  # noqa: E402


def test_trace_has_the_images_and_their_places(trained):
    _, *groups = trace_file.read(trained.folder / "trace" / "step_000001.jsonl.gz")
    of_prompt = {group["prompt"]: group["completions"][0] for group in groups}
    assert "images" not in of_prompt["None?"]
    completion = of_prompt["Two?"]
    assert [image["file"] for image in completion["images"]] == [*map(str, trained.pictures)]
    inside = [i for x in completion["images"] for i in range(x["start"], x["end"])]
    placeholders = [i for i, token in enumerate(completion["tokens"]) if token == "<image>"]
    assert {*placeholders} < {*inside} and completion["images"][1]["end"] == placeholders[-1] + 1


def test_image_that_has_changed_is_a_problem(trained):
    file = trained.pictures[1]
    content = file.read_bytes()
    picture(60, 40, 7).save(file)
    try:
        found = view.collect([trained.folder], embed=True)["pictures"].values()
        assert sum("url" in x for x in found) == 1
        assert [x["problem"] for x in found if "problem" in x] == [
            "the file has changed since the run read it"
        ]
    finally:
        file.write_bytes(content)


def test_pictures_are_small_and_a_bad_one_is_a_problem(trained, tmp_path):
    from extras.images.image_files import digest
    from extras.trace import pictures

    (tmp_path / "big.png").touch()
    picture(900, 700, 0).save(tmp_path / "big.png")
    (tmp_path / "bad.png").write_text("no image")
    files = {
        digest((tmp_path / name).read_bytes()): str(tmp_path / name)
        for name in ("big.png", "bad.png")
    }
    found = pictures.pictures_of(files | {"0": str(tmp_path / "absent.png")})
    big, bad, absent = found.values()
    assert 30_000 < len(big["url"]) <= pictures.LIMIT
    assert "cannot identify image file" in bad["problem"]
    assert absent == dict(problem="No such file or directory")


def test_live_page_gets_the_pictures_of_a_trace(trained):
    ready, servers = threading.Event(), []
    started = lambda server: (servers.append(server), ready.set())  # noqa: E731
    thread = threading.Thread(target=view.serve, args=([trained.folder], 0, started))
    thread.start()
    try:
        assert ready.wait(30)
        address = f"http://localhost:{servers[0].server_port}"
        with urllib.request.urlopen(f"{address}/pictures/0/1") as answer:
            found = json.load(answer)
        with urllib.request.urlopen(f"{address}/data") as answer:
            assert json.load(answer)["pictures"] == {}
    finally:
        servers[0].shutdown()
        thread.join()
    assert [x["url"][:22] for x in found.values()] == ["data:image/png;base64,"] * 2


@pytest.mark.skipif(not CHROMIUM, reason="chromium is missing: apt-get install chromium")
def test_viewer_shows_pictures_and_folds_their_tokens(trained):
    path = trained.folder / "trace" / "step_000001.jsonl.gz"
    header, *groups = trace_file.read(path)
    groups.sort(key=lambda group: "Two?" not in group["prompt"])  # the page shows the first one
    trace_file.write(path, [header, *groups])
    html = trained.folder / "view.html"
    html.write_text(view.page(view.collect([trained.folder], embed=True) | dict(live=0)))
    assert html.read_text().count("data:image/png") == 2
    assert dom(html).count("<img src=") == 2
