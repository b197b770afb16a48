"""The built-in task `squares`: count the coloured squares in a picture."""

import random

from PIL import Image

COLORS = dict(red=(220, 40, 40), green=(40, 170, 60), blue=(50, 90, 230), yellow=(240, 200, 40))
SIDE = 4  # cells
CELL = 8  # pixels
MOST = 9  # squares
SIZES = dict(train=4_000, test=200)


def squares_rows(split: str) -> list[dict]:
    """Return rows with `images`, `prompt`, `completion`, `answer`, `chosen`, `rejected`, `squares`.

    A picture of 32 x 32 pixels has 4 x 4 cells, with at most one square in each. The prompt is `How
    many squares?`, the answer a digit from 1 to 9. If there are more than two, the `completion`
    misses one of them three times in ten. A model that imitates it therefore still gives most
    weight to the right answer, and rewards can improve it. `chosen` is the answer, `rejected` one
    more or one less. `squares` lists colour, place and size in pixels. A row depends only on its
    split and number."""
    return [_row(random.Random(f"squares {split} {n}")) for n in range(SIZES[split])]


def _row(rng: random.Random) -> dict:
    ground = rng.randrange(210, 256)
    picture = Image.new("RGB", (SIDE * CELL, SIDE * CELL), (ground, ground, ground))
    squares = []
    for cell in rng.sample(range(SIDE * SIDE), rng.randint(1, MOST)):
        down, right = divmod(cell, SIDE)
        size = rng.randint(4, 7)
        x = right * CELL + rng.randint(0, CELL - size)
        y = down * CELL + rng.randint(0, CELL - size)
        color = rng.choice([*COLORS])
        picture.paste(COLORS[color], (x, y, x + size, y + size))
        squares.append(dict(color=color, x=x, y=y, size=size))
    count = len(squares)
    overlooked = int(count > 2 and rng.random() < 0.3)
    near = [n for n in (count - 1, count + 1) if 1 <= n <= MOST]
    return dict(
        images=[picture],
        prompt="How many squares?",
        completion=str(count - overlooked),
        answer=str(count),
        chosen=str(count),
        rejected=str(rng.choice(near)),
        squares=squares,
    )
