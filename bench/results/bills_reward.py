"""Reward of the task bills (rows.py): 0.2 for an object with the right keys, 1 if its values are
right too."""

import json


def right_object(completion, row):
    try:
        found = json.loads(completion)
    except ValueError:
        return 0.0
    wanted = json.loads(row["answer"])
    if not isinstance(found, dict) or found.keys() != wanted.keys():
        return 0.0
    return 1.0 if found == wanted else 0.2
