"""Rows with images from every source become rows with paths, with marks where images belong."""

import base64
import io
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from common.config.groups import TrainArgs
from common.text.messages import messages_field
from common.text.rows import load_rows, rows_of_split
from extras.images.image_files import IMAGE, digest, require_image, stored, take_images
from extras.images.tests.checkpoints import picture


def png(seed: int = 0) -> bytes:
    content = io.BytesIO()
    picture(9, 7, seed).save(content, "PNG")
    return content.getvalue()


ONE, TWO = png(1), png(2)
URL = f"data:image/png;base64,{base64.b64encode(ONE).decode()}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    """Folder of data, with two pictures."""
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "one.png").write_bytes(ONE)
    (folder / "sub" / "two.png").write_bytes(TWO)
    return folder


def user(content) -> list[dict]:
    return [dict(role="user", content=content)]


def taken(row: dict, column: str = "prompt") -> dict:
    """Return a row after `take_images`, with its messages in the column."""
    row = dict(_source="x:1") | row
    row[column] = take_images(row, messages_field(row, column) or user(row[column]))
    return row


def contents(row: dict) -> list[bytes]:
    return [open(file, "rb").read() for file in row["images"]]


# ---- sources ----

PART = dict(type=datasets.Value("string"), text=datasets.Value("string"), image=datasets.Image())
FEATURES = dict(
    image=datasets.Image(),
    images=datasets.List(datasets.Image()),
    messages=datasets.List(dict(role=datasets.Value("string"), content=datasets.List(PART))),
)
IN_PARTS = user(
    [dict(type="image", text=None, image=dict(bytes=TWO, path=None)),
     dict(type="text", text="?", image=None)]
)  # fmt: skip
TABLE = dict(
    image=(dict(bytes=ONE, path="a.png"), [ONE]),
    images=([dict(bytes=ONE, path=None), dict(bytes=TWO, path="b.png")], [ONE, TWO]),
    messages=(IN_PARTS, [TWO]),
)


@pytest.mark.parametrize("column", TABLE)
@pytest.mark.parametrize("kind", ["parquet", "saved", "bare"])
def test_images_in_tables_are_not_decoded(kind, column, folder):
    """A table with the `Image` feature of datasets and a bare struct give the bytes as they are."""
    value, expected = TABLE[column]
    features = datasets.Features({column: FEATURES[column]})
    table = datasets.Dataset.from_dict({column: [value]}, features=features)
    path = folder / f"rows.{kind}"
    if kind == "saved":
        table.save_to_disk(path)
    elif kind == "bare":
        path = folder / "bare.parquet"
        pq.write_table(pa.Table.from_pylist([{column: value}]), path)
    else:
        table.to_parquet(path)
    (row,) = load_rows("--dataset", str(path), "train", TrainArgs())
    column = "messages" if column == "messages" else "prompt"
    assert contents(taken(row | dict(prompt="?"), column)) == expected


def test_paths_are_relative_to_the_data(folder):
    rows = [dict(photo="one.png", prompt="?"), dict(photo="sub/two.png", prompt="?"),
            dict(photo=URL, prompt="?")]  # fmt: skip
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = TrainArgs(columns=("image=photo",))
    found = rows_of_split("--dataset", [str(folder / "rows.jsonl")], "", "train", args)
    assert [contents(taken(row)) for row in found] == [[ONE], [TWO], [ONE]]


def test_columns_of_ours_in_the_data_are_ignored(folder):
    """Data must not choose its own folder, nor the places of images."""
    (folder / "rows.jsonl").write_text(json.dumps(dict(_folder="/", _images=[1], prompt="?")))
    (row,) = load_rows("--dataset", str(folder / "rows.jsonl"), "train", TrainArgs())
    assert row["_folder"] == str(folder) and "_images" not in row


# ---- places ----

IMAGE_URL = dict(type="image_url", image_url=dict(url=URL, detail="low"))
MARKED = [
    (dict(images=[ONE], prompt="Why?"), f"{IMAGE}Why?"),
    (dict(images=[ONE, TWO], prompt="<image> or <image>?"), f"{IMAGE} or {IMAGE}?"),
    (dict(images=[ONE], prompt=user("<image>\nWhy?")), user(f"{IMAGE}\nWhy?")),
    (dict(images=[ONE], prompt=[dict(role="system", content="s"), *user("Why?")]),
     [dict(role="system", content="s"), *user(f"{IMAGE}Why?")]),
    (dict(image=ONE, prompt=user([dict(type="text", text="a"), dict(type="image")])), f"a{IMAGE}"),
    (dict(prompt=user([dict(type="image", image=ONE), dict(type="text", text="<image>")])),
     f"{IMAGE}<image>"),  # the placeholder of a text is text beside parts
    (dict(prompt=user([IMAGE_URL, dict(type="text", text="?")])), f"{IMAGE}?"),
    (dict(images=[ONE], prompt=[*user("a"), dict(role="assistant", content="<image>"), *user("b")]),
     [*user(f"{IMAGE}a"), dict(role="assistant", content="<image>"), *user("b")]),
]  # fmt: skip


@pytest.mark.parametrize(("row", "expected"), MARKED)
def test_marks_stand_where_images_belong(row, expected):
    found = taken(row)
    assert found["prompt"] == (user(expected) if isinstance(expected, str) else expected)
    assert contents(found)[0] == ONE


SAY = [dict(role="assistant", content="x")]
NO = [dict(role="assistant", content="y")]
ASKED = user([dict(type="image", image=ONE), dict(type="text", text="?")])
PAIRS = [
    dict(images=[ONE], prompt="?", chosen="x", rejected="y"),
    dict(images=[ONE], chosen=user("?") + SAY, rejected=user("?") + NO),
    dict(images=[ONE], prompt="?", chosen=user("?") + SAY, rejected=user("?") + NO),
    dict(prompt="?", chosen=ASKED + SAY, rejected=ASKED + NO),
    dict(prompt=ASKED, chosen=ASKED + SAY, rejected=ASKED + NO),
]


@pytest.mark.parametrize("row", PAIRS)
def test_preferences_of_every_form_have_one_prompt(row, encoder_of):
    """The prompt has its own column or begins both; each form has the same tokens."""
    from common.text.pairs import encode_pair

    row = row | dict(_source="x:1")
    columns = tuple(name for name in ("prompt", "chosen", "rejected") if name in row)
    encoder = encoder_of("idefics3", prompt_format="chat")
    chosen, rejected = encode_pair(encoder, row, columns)
    text = encoder.tokenizer.decode(chosen.ids)
    assert text.count("<image>") == 20
    assert chosen.images == rejected.images and chosen.prompt_ids == rejected.prompt_ids
    assert text.endswith("?<|end_of_turn|>\n<|turn|>assistant\nx<|end_of_turn|>")


OTHER = user([dict(type="image", image=TWO), dict(type="text", text="?")])


@pytest.mark.parametrize("row", [
    dict(chosen=ASKED + SAY, rejected=OTHER + NO),
    dict(chosen=ASKED + SAY, rejected=user("?") + NO),
    dict(prompt=OTHER, chosen=ASKED + SAY, rejected=ASKED + NO),
    dict(prompt=user("?"), chosen=SAY + ASKED + SAY, rejected=NO + OTHER + NO),
])  # fmt: skip
def test_sides_with_other_pictures_are_refused(row, encoder_of):
    from common.text.pairs import encode_pair

    encoder = encoder_of("idefics3", prompt_format="chat")
    with pytest.raises(
        ValueError,
        match="^x:1: .*(not.* begin with the same prompt|not with the pro|show different images)",
    ):
        encode_pair(encoder, row | dict(_source="x:1"), tuple(row))


# ---- what is no image, or not in its place ----


def saved(image: Image.Image, kind: str, **options) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


# 16,000 x 11,000 black pixels
WEBP = bytes.fromhex("524946461a000000574542505650384c0e0000002f7ffebd0a071011fd0f4444ff03")
BAD = {
    "none": (None, "image 1 is missing; give a path"),
    "number": (5, "is of type int; give a path"),
    "empty struct": (dict(bytes=None, path=None), "image 1 is missing"),
    "empty": (b"", "cannot be read: it is empty"),
    "text": (b"no picture", "cannot be read: no image, or of an unknown format"),
    "cut png": (ONE[:40], "cannot be read"),
    "animation": (saved(picture(9, 7, 0), "GIF", save_all=True, append_images=[picture(9, 7, 1)]),
                  "cannot be read: it has 2 pictures; give one"),
    "bomb": (saved(Image.new("1", (20_000, 10_000)), "PNG"), "more than 90,000,000 pixels"),
    "many pixels": (saved(Image.new("1", (10_000, 9_100)), "PNG"), "90,000,000 pixels; scale it"),
    "webp": (WEBP, "more than 90,000,000 pixels; scale it down, or raise PIXELS in extras/images"),
    "http": ("https://a.b/c.png", "is not fetched; download it"),
    "file url": ("file:///etc/passwd", "is not fetched"),
    "nul": ("a\0b.png", "no such file in"),
    "surrogate": ("\ud800.png", "no such file in"),
    "long": ("a" * 5000, "no such file in"),
    "folder": ("sub", "no such file in"),
    "parent": ("../secret.png", "is outside of the data's folder"),
    "absolute": ("/etc/passwd", "is outside of the data's folder"),
    "link": ("link.png", "is outside of the data's folder"),
    "data url": ("data:image/png,abc", "no base64 .it is in another form"),
    "no base64": ("data:image/png;base64,a%b", "no base64"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_bad_image_is_one_clear_error(kind, folder):
    image, expected = BAD[kind]
    (folder.parent / "secret.png").write_bytes(ONE)
    (folder / "link.png").symlink_to("../secret.png")
    with pytest.raises(ValueError, match=rf"(?s)^x:1: image 1\W.*{expected}|^x:1: {expected}") as e:
        taken(dict(images=[image], prompt="?", _folder=str(folder)))
    assert "\n" not in str(e.value)


def test_path_in_a_table_without_a_folder_is_refused(folder):
    with pytest.raises(ValueError, match="only data in files may name paths"):
        taken(dict(image=str(folder / "one.png"), prompt="?"))


BAD_PLACES = {
    "fewer": (dict(images=[ONE], prompt="<image> <image>"), "2 places for images, the row has 1"),
    "more": (dict(images=[ONE, TWO], prompt="<image>"), "1 places for images, the row has 2"),
    "parts": (dict(prompt=user([dict(type="image")])), "1 places for images, the row has 0"),
    "mark": (dict(images=[ONE], prompt=f"a{IMAGE}"), "contains U"),
    "reply": (dict(prompt=[*ASKED, dict(ASKED[0], role="assistant")]), "turn 2 .assistant. has an"),
    "null": (dict(images=None, prompt=user("<image>?")), "1 places for images, the row has 0"),
    "no user": (dict(images=[ONE], prompt=[dict(role="system", content="a")]), "no turn of the"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_PLACES)
def test_images_in_the_wrong_places_are_refused(kind):
    row, expected = BAD_PLACES[kind]
    with pytest.raises(ValueError, match=f"^x:1.*{expected}"):
        taken(row)


def test_content_is_stored_once_and_only_if_it_is_a_picture(tmp_path):
    for content in (ONE[:40], b"no picture" * 1000):
        with pytest.raises(ValueError, match="cannot be read"):
            taken(dict(images=[content], prompt="?"))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert stored(ONE) == stored(bytes(bytearray(ONE))) != stored(TWO)
    assert stored(ONE).endswith(digest(ONE))


def test_formats(tmp_path):
    """An EPS would start another program. An MPO is a photograph with a small copy."""
    with pytest.raises(ValueError, match="no image, or of an unknown format"):
        (tmp_path / "a.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
        require_image("a", str(tmp_path / "a.eps"))
    one, other = picture(16, 16, 0), picture(16, 16, 1)
    one.save(tmp_path / "a.mpo", save_all=True, append_images=[other])
    require_image("a", str(tmp_path / "a.mpo"))
