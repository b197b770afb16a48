"""Worlds of squares, drawn as text: rules and rows of the tasks `frozen_lake` and `sokoban`.

A place is the index of a character."""

import random
from collections import deque

from common.data.tasks import MOVES, OPPOSITE


def beside(grid: str, place: int, direction: str) -> int | None:
    """Return the next place in a direction, None outside of the grid."""
    down, right = MOVES[direction]
    width = len(grid.partition("\n")[0]) + 1
    place += down * width + right
    return place if 0 <= place < len(grid) and grid[place] != "\n" else None


def draw_lake(lake: str, place: int) -> str:
    """Return the lake with the player, `@`."""
    lake = lake.replace("S", "F")
    return f"{lake[:place]}@{lake[place + 1 :]}"


def path(lake: str) -> list[str] | None:
    """Return the moves of a shortest path from S to a G, None if there is no path."""
    start = lake.index("S")
    moves: dict[int, list[str]] = {start: []}
    places = deque([start])
    while places:
        place = places.popleft()
        if lake[place] == "G":
            return moves[place]
        for direction in MOVES:
            ahead = beside(lake, place, direction)
            if ahead is not None and ahead not in moves and lake[ahead] != "H":
                moves[ahead] = [*moves[place], direction]
                places.append(ahead)
    return None


def lake_row(rng: random.Random) -> dict:
    """Return a row of `frozen_lake`. Its demonstration is a shortest path."""
    moves = None
    while moves is None:
        squares = rng.choices("FFFH", k=16)
        start, goal = rng.sample(range(16), 2)
        squares[start] = "S"
        squares[goal] = "G"
        lake = "\n".join("".join(squares[i : i + 4]) for i in range(0, 16, 4))
        moves = path(lake)
    place = lake.index("S")
    messages = []
    for direction in moves:
        messages.append(dict(role="user", content=draw_lake(lake, place)))
        messages.append(dict(role="assistant", content=direction))
        place = beside(lake, place, direction)
    return dict(prompt=messages[:1], map=lake, messages=messages)


def move_player(level: str, direction: str, pulls: bool = False) -> str | None:
    """Return a level of Sokoban after a move of the player, who pushes the box ahead. `pulls`: who
    pulls the box behind, as in a move backwards in time. None if the move is blocked."""
    player = max(level.find("@"), level.find("+"))
    ahead = beside(level, player, direction)
    behind = beside(level, player, OPPOSITE[direction])
    beyond = None if ahead is None else beside(level, ahead, direction)
    shifts = [(player, ahead), (behind, player)] if pulls else [(ahead, beyond), (player, ahead)]
    squares = list(level)
    for place, to in shifts:
        if place is None or squares[place] not in "@+$*":
            continue  # no box
        if to is None or squares[to] not in " .":
            return None
        thing = "@+" if squares[place] in "@+" else "$*"
        squares[to] = thing[squares[to] == "."]
        squares[place] = "." if squares[place] in "+*" else " "
    return "".join(squares)


def level_row(rng: random.Random) -> dict:
    """Return a row of `sokoban`, a room of four by four, played backwards from its solution. Its
    demonstration plays forwards."""
    levels: list[str] = []
    while not levels or "$" not in levels[-1]:
        squares = rng.choices("       #", k=16)
        player, *boxes = rng.sample(range(16), rng.randint(2, 3))
        squares[player] = "@"
        for box in boxes:
            squares[box] = "*"
        rows = ["#" + "".join(squares[i : i + 4]) + "#" for i in range(0, 16, 4)]
        levels = ["\n".join(["#" * 6, *rows, "#" * 6])]
        moves: list[str] = []
        for _ in range(rng.randint(4, 16)):
            direction = rng.choice(list(MOVES))
            level = move_player(levels[-1], direction, pulls=True)
            if level in levels:  # a loop
                del moves[levels.index(level) :]
                del levels[levels.index(level) + 1 :]
            elif level is not None:
                levels.append(level)
                moves.append(OPPOSITE[direction])
    start = level = levels[-1]
    messages = []
    while "$" in level:
        direction = moves.pop()
        messages.append(dict(role="user", content=level))
        messages.append(dict(role="assistant", content=direction))
        level = move_player(level, direction)
    return dict(prompt=messages[:1], level=start, messages=messages)
