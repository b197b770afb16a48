"""Teachers with the weights of the student, now or earlier."""

import torch
from torch import nn

from common.config.groups import TrainArgs
from common.model.policy import load_policy
from common.model.student import Student, Teacher


class OwnTeacher(Student, Teacher):
    """Policy that learns from itself."""

    forward_methods = Student.forward_methods + Teacher.forward_methods


def load_own_teacher(policy: OwnTeacher, args: TrainArgs, device: torch.device) -> nn.Module:
    """Return the model of `--teacher` of self_distill.py: the policy, or a frozen copy, in float32
    if it is to move. With adapters a copy is the policy with other adapters. Collective."""
    if args.teacher == "live":
        return policy
    if args.lora_rank:
        from common.model.lora import StartingModel

        return StartingModel(policy)
    moves = args.teacher == "ema"
    return load_policy(
        policy.path, args, device, trainable=False, flag="--teacher", kind=Teacher, moves=moves
    )
