"""Run a script of a rank in the network namespace of its machine: in_namespace.py NAMES ADDRESS
SCRIPT FLAGS..."""

import ctypes
import os
import runpy
import sys

_, names, address, *sys.argv = sys.argv
name = f"{names}{os.environ['RANK']}"
with open(f"/run/netns/{name}") as namespace:
    assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0, name
del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
os.environ |= dict(
    MASTER_ADDR=address,
    MASTER_PORT="29400",
    GLOO_SOCKET_IFNAME=name,
    LOCAL_RANK="0",
    LOCAL_WORLD_SIZE="1",
)
runpy.run_path(sys.argv[0], run_name="__main__")
