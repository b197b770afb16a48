"""`--environment`: it answers the model between the model's turns. An environment is a class whose
constructor takes no arguments. Each episode gets its own object of the class:

    reset(example: dict) -> messages                   the prompt of a data row, the same every time
    step(completion: str) -> messages, reward, done    the answer to one turn of the model

`--reward environment` is the sum of the rewards of the turns.

An environment runs in a process of its own (common/workers/pool.py): if it hangs or dies, only its
episode fails. The model's turns keep the tokens that were sampled. An answer of the environment
becomes the token ids that the chat template gives it, and is not trained."""

import copy
import sys
from collections.abc import Callable

from common.config.extra import load_named
from common.config.online import CompletionArgs, SamplingArgs
from common.packs.sample import Completion
from common.rollout.engine import Engine
from common.text.encode import Encoder
from common.text.messages import messages_field
from common.workers.pool import ForkServer, Process
from common.workers.user_code import load_callable
from common.workers.worker import one_line

Message = dict[str, str]
BUILT_IN = dict(calculator="extras.tools.calculator:Calculator")


def load_environment(name: str) -> Callable:
    """Return the class of a built-in environment, or of `path/to/file.py:Class`. Raises
    `ValueError` for anything else."""
    if name in BUILT_IN:
        return load_named(BUILT_IN[name], f"--environment {name}")
    if ":" not in name:
        names = ", ".join(BUILT_IN)
        raise ValueError(f"--environment {name}: unknown; there are {names}, path/to/file.py:Class")
    environment = load_callable("--environment", name)
    methods = ("reset", "step")
    if not isinstance(environment, type) or not all(hasattr(environment, x) for x in methods):
        raise ValueError(f"--environment {name}: not a class with the methods reset and step")
    return environment


def prompt_maker_of_environment(args: CompletionArgs) -> Callable[[dict], list[Message]]:
    """Return a function that makes the prompt of a data row: the messages that the environment's
    `reset` returns for it. It raises `ValueError` for a row that the environment cannot use."""
    environment = load_environment(args.environment)

    def first_messages(row: dict) -> list[Message]:
        place = f"{row['_source']}: --environment {args.environment}"
        doing = "reset"
        instance = None
        try:
            try:
                instance = environment()
                messages = instance.reset(copy.deepcopy(row))
                doing = "close"
            finally:
                if hasattr(instance, "close"):
                    instance.close()
        except BaseException as error:  # the user's code may raise anything
            raise ValueError(f"{place} fails in {doing}: {one_line(error)}") from error
        if not messages_field(dict(_source=place, reset=messages), "reset"):
            raise ValueError(f"{place}: reset returns no list of messages")
        return messages

    return first_messages


# ---- episodes ----


def last_token(completion: Completion, args: CompletionArgs) -> int | None:
    """Return the last token of the turn if it may lack its EOS, for `Encoder.reply`; else None."""
    has_eos = completion.finish_reason == "stop" and not (args.stop or args.stop_token_ids)
    return None if has_eos else completion.ids[-1]


def episode_server(target: str, argument: object = None) -> ForkServer:
    """Return a server that starts a process for each episode. Each process takes an open file here
    and one in the server, so this raises the limit on open files as far as the system allows."""
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return ForkServer(target, shared=True, argument=argument)


class Environments:
    """The partner (`partner_of`) for `--environment`: begins an episode for each completion."""

    def __init__(self, args: SamplingArgs, engine: Engine):
        self.args = args
        self.encoder = Encoder(engine.tokenizer, args)
        name = args.environment or ""
        self.server = episode_server(BUILT_IN.get(name, name))

    def begin(self, row: dict) -> "EnvironmentEpisode":
        return EnvironmentEpisode(self, row)

    def close(self) -> None:
        self.server.close()


class EnvironmentEpisode:
    """One environment, in its process. Its `reset` is called only after the model's first turn: the
    prompt, which `reset` returns, has been known since the start of the run."""

    def __init__(self, environments: Environments, row: dict):
        self.row = row
        self.args = environments.args
        self.encoder = environments.encoder
        self.process = Process(environments.server)

    async def answer(self, completion: Completion) -> list[int] | None:
        """Return the ids of the environment's next messages; see `Episode` in episodes.py."""
        doing = "reset"
        try:
            if completion.turns == 1 and await self._call("reset", self.row) != self.row["_prompt"]:
                raise ValueError("not the same messages as at the start of the run")
            doing = f"step {completion.turns}"
            messages, reward, done = await self._call("step", completion.text)
            completion.turn_rewards.append((len(completion.ids) - 1, float(reward)))
            if not done:
                return self.encoder.reply(messages, last_token(completion, self.args))
        except Exception as error:
            problem = error if isinstance(error, Failure) else one_line(error)
            completion.error = f"{doing}: {problem}"
        return None

    def end(self, completion: Completion) -> None:
        self.process.close()

    async def _call(self, method: str, *arguments: object):
        """Call a method of the environment in its process. Raises `Failure` if the method fails."""
        result = await self.process.call(method, *arguments, seconds=self.args.answer_seconds)
        if result.error is not None:
            raise Failure(result.error)
        return result.value


class Failure(Exception):
    """An error in the environment's process, in one line."""
