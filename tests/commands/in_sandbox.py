"""Run a program as a shell would in a folder, where the hub is another folder:

in_sandbox.py FOLDER HUB STDIN [NAME=VALUE ...] SCRIPT FLAGS...
"""

import io
import os
import runpy
import sys

import datasets
import huggingface_hub
from commands.varied import varied

from common.rewards.functions import REWARDS
from common.text import files

folder, hub, text, *words = sys.argv[1:]
while "=" in words[0]:
    name, _, os.environ[name] = words.pop(0).partition("=")
os.environ["WANDB_MODE"] = "offline"
os.chdir(folder)
sys.stdin = io.StringIO(text)
sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
task = files.load_named
files.load_named = lambda *named: lambda split: task(*named)(split)[:40]
load, names = datasets.load_dataset, datasets.get_dataset_config_names
huggingface_hub.snapshot_download = lambda repo_id, **_: f"{hub}/{repo_id}"
datasets.load_dataset = lambda name, *rest, **named: load(f"{hub}/{name}", *rest, **named)
datasets.get_dataset_config_names = lambda name: names(f"{hub}/{name}")
REWARDS["varied"] = varied
if words[0] == "-c":
    sys.argv = ["-c", *words[2:]]
    exec(words[1], {})
else:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
