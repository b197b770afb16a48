"""Images in traces and in the viewer."""

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
        found = view.collect([trained.folder])["pictures"].values()
        assert sum("url" in x for x in found) == 1
        problems = [x["problem"] for x in found if "problem" in x]
        assert problems == [f"{file}: it has changed since the run read it"]
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
    assert big["url"].startswith("data:image/webp;base64,") and len(big["url"]) < 70_000  # noise
    assert "cannot be read: no image" in bad["problem"]
    assert "No such file or directory" in absent["problem"]


@pytest.mark.skipif(not CHROMIUM, reason="chromium is missing: apt-get install chromium")
def test_viewer_shows_pictures_and_folds_their_tokens(trained):
    path = trained.folder / "trace" / "step_000001.jsonl.gz"
    header, *groups = trace_file.read(path)
    groups.sort(key=lambda group: "Two?" not in group["prompt"])  # the page shows the first one
    trace_file.write(path, [header, *groups])
    html = trained.folder / "view.html"
    html.write_text(view.page(view.collect([trained.folder])))
    assert html.read_text().count("data:image/webp") == 2
    assert dom(html).count("<img src=") == 2
