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


def test_pictures_are_small_and_a_bad_one_is_a_problem(tmp_path):
    from extras.images.image_files import digest
    from extras.trace import pictures

    for name in ("big.png", "bad.png", "changed.png"):
        picture(900, 700, 0).save(tmp_path / name)
    big = digest((tmp_path / "big.png").read_bytes())
    (tmp_path / "bad.png").write_text("no image")
    names = {big: "big.png", "1": "bad.png", "2": "changed.png", "3": "absent.png"}
    found = pictures.pictures_of({key: str(tmp_path / name) for key, name in names.items()})
    shown, *problems = found.values()
    assert shown["url"].startswith("data:image/webp;base64,") and len(shown["url"]) < 70_000
    words = ("no image", "it has changed since the run read it", "No such file or directory")
    assert all(word in x["problem"] for word, x in zip(words, problems, strict=True))


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
