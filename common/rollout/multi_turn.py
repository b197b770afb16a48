"""`--environment`: episodes of several turns, in which model and environment alternate.

The tokens of a turn stay as they were sampled. The answer of the environment is appended as the
token ids that the chat template gives it, without loss. An episode is one `Completion` that begins
with the model's first turn and ends with its last one; the environment's last answer is dropped.

The next turn is requested as soon as the environment has answered."""

import copy
from bisect import bisect_left
from collections.abc import Callable

from common.config.online import SamplingArgs
from common.data.encode import Encoder
from common.data.messages import messages_field
from common.data.sample import Completion
from common.parallel import distributed
from common.rollout.engine import Engine, Request
from common.rollout.environment_pool import Answer, Environments
from common.rollout.environments import Message, load_environment
from common.rollout.episode import Episode


def prompt_maker_of_environment(args: SamplingArgs) -> Callable[[dict], list[Message]]:
    """Return the function row -> prompt of the environment, the messages of its reset. It raises
    `ValueError` naming the row that the environment cannot use."""
    name = args.environment
    environment = load_environment(name, args.records_states)

    def first_messages(row: dict) -> list[Message]:
        place = f"{row['_source']}: --environment {name}"
        try:
            messages = environment().reset(copy.deepcopy(row))
        except BaseException as error:  # the user's code may raise anything
            problem = f"{type(error).__name__}: {distributed.first_line(error)}"
            raise ValueError(f"{place} fails in reset: {problem}") from error
        if not messages_field(dict(_source=place, reset=messages), "reset"):
            raise ValueError(f"{place}: reset returns no list of messages")
        return messages

    return first_messages


def on_turns(completion: Completion, values: list[float]) -> list[float]:
    """Return, for each id of a completion, the number of the turn that has it or follows it."""
    ends = [index for index, _ in completion.turn_rewards[: completion.turns - 1]]
    return [values[bisect_left(ends, index)] for index in range(len(completion.ids))]


class Turns:
    """Environments of episodes in flight, and the episodes that wait for one."""

    def __init__(self, args: SamplingArgs, engine: Engine):
        self.args = args
        self.tokenizer = engine.tokenizer
        self.encoder = Encoder(engine.tokenizer, args)
        self.environments = Environments(
            args.environment, args.answer_seconds, records_states=args.records_states
        )
        self.playing: dict[int, Episode] = {}  # episodes that wait for their environment, by number

    def end_turn(self, episode: Episode) -> None:
        """Hand a turn of the model to the environment."""
        completion = episode.completion
        if completion.turns == 1:
            self.environments.reset(episode.number, episode.prompt.row)
        self.environments.step(episode.number, completion.text)
        self.playing[episode.number] = episode

    def next_turns(self, wait: float) -> list[tuple[Episode, Request | None]]:
        """Return the episodes whose environments have answered, each with the request for its next
        turn, or None if it ends here. Wait up to `wait` seconds for the first answer."""
        answers = self.environments.answers(wait)
        episodes = [self.playing.pop(number) for number, _ in answers]
        return [
            (episode, self._next_turn(episode, answer))
            for episode, (_, answer) in zip(episodes, answers, strict=True)
        ]

    def close(self) -> None:
        self.environments.close()

    def end_episode(self, episode: Episode) -> None:
        """End the environment of an episode and decode all its turns."""
        completion = episode.completion
        if episode.number in self.environments.episodes:  # not if the first turn was truncated
            completion.states = self.environments.episodes[episode.number].states
            self.environments.end(episode.number)
        completion.transcript = self.tokenizer.decode(completion.completion_ids)

    def _next_turn(self, episode: Episode, answer: Answer) -> Request | None:
        """Add the environment's answer to the episode."""
        completion = episode.completion
        completion.error = answer.error
        if answer.error:
            return None
        completion.turn_rewards.append((len(completion.ids) - 1, answer.reward))
        if answer.done:
            return None
        stops = self.args.stop or self.args.stop_token_ids  # a turn may lack its EOS
        try:
            reply = self.encoder.reply(answer.messages, completion.ids[-1] if stops else None)
        except Exception as error:  # the messages come from the user's code
            problem = f"{type(error).__name__}: {distributed.first_line(error)}"
            completion.error = f"step {completion.turns}: {problem}"
            return None
        return next_request(episode, reply, self.args)


def next_request(episode: Episode, reply: list[int], args: SamplingArgs) -> Request | None:
    """Append the reply to the last turn of an episode. Return the request for the next turn, or
    None if a limit truncates the episode."""
    completion = episode.completion
    length = len(completion.completion_ids) + len(reply)
    room = args.max_new_tokens - length
    if completion.turns == args.max_turns or room <= 0:
        completion.finish_reason = "length"
        return None
    completion.append_reply(reply)
    return episode.turn(room)
