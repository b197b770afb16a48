"""Families of models: a chat template with a tokenizer that fits it, and the tokens that end a
sampled turn."""

import copy
import functools
from dataclasses import dataclass
from pathlib import Path

from field.real_tokenizers import INSTALLED, PACKAGES, tokenizer
from tokenizers import AddedToken

from common.config.groups import BaseArgs
from common.text.encode import Encoder

OURS = Path(__file__).parent / "templates"
TRL = PACKAGES / "trl" / "chat_templates"

CHATML = ("<|im_start|>", "<|im_end|>")
DEEPSEEK = (
    "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)  # fmt: skip
COHERE = ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
          "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")  # fmt: skip
GEMMA = ("<start_of_turn>", "<end_of_turn>")
GEMMA4 = (
    "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool>",
    "<tool|>", "<|tool_response>", "<tool_response|>", "<|think|>", '<|"|>',
)  # fmt: skip
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
       "<|endoftext|>")  # fmt: skip
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
LLAMA4 = ("<|header_start|>", "<|header_end|>", "<|eot|>")
MISTRAL = (
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
MUSE = ("<|start|>", "<|message|>", "<|eot|>", "<|eom|>")
LFM2 = (
    *CHATML, "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>",
    "<|tool_response_start|>", "<|tool_response_end|>",
)  # fmt: skip
UTTERANCE = ("<|im_start|>", "<end_of_utterance>", "<image>")


@dataclass(frozen=True)
class Family:
    """A template file with the name of its tokenizer."""

    template: Path
    tokenizer: str
    ends: tuple[str, ...]
    """tokens that the model samples at the end of a turn"""
    tokens: tuple[str, ...] = ()
    """special tokens of the family, added where the tokenizer lacks them"""
    eos: str | None = None
    """EOS of the model, if it is not the tokenizer's own"""

    @property
    def name(self) -> str:
        return f"{self.template.stem}-{self.tokenizer}"

    def available(self) -> bool:
        """Return whether the files are here: those of `make field` may be missing."""
        return self.template.is_file() and (self.tokenizer in INSTALLED or PACKAGES.is_dir())

    def load(self):
        """Return the tokenizer with the template. Families share the vocabulary, which takes
        seconds to load."""
        loaded = copy.copy(_with_tokens(self.tokenizer, self.tokens))
        loaded._special_tokens_map = dict(loaded._special_tokens_map)  # which copy.copy shares
        loaded.chat_template = self.template.read_text(encoding="utf-8")
        if self.eos:
            loaded.eos_token = self.eos
        return loaded

    def encoder(self, **flags: object) -> Encoder:
        return Encoder(self.load(), BaseArgs(**flags))


@functools.cache
def _with_tokens(name: str, tokens: tuple[str, ...]):
    loaded = tokenizer(name)
    known = loaded.get_vocab()
    names = [token for token in tokens if token not in known]
    new = [AddedToken(name, special=True, normalized=False) for name in names]
    loaded.add_tokens(new)
    return loaded


def ours(template: str, tokenizer: str, ends: tuple[str, ...], *more: object) -> Family:
    return Family(OURS / f"{template}.jinja", tokenizer, ends, *more)


def trl(names: str, tokenizer: str, ends: tuple[str, ...], *more: object) -> list[Family]:
    return [Family(TRL / f"{name}.jinja", tokenizer, ends, *more) for name in names.split()]


IM_END, EOT, STOP, TURN_END = ("<|im_end|>",), ("<|eot_id|>",), ("</s>",), ("<end_of_turn>",)
GLM_ENDS, HARMONY_ENDS, SENTENCE = GLM[3::2] + GLM[-1:], HARMONY[4:], ("<｜end▁of▁sentence｜>",)
GEMMA4_ENDS = ("<turn|>", "<|tool_response>")  # the second one calls the tool
COHERE_END, UTTERANCE_END = ("<|END_OF_TURN_TOKEN|>",), ("<end_of_utterance>",)
FAMILIES = [
    ours("qwen2_5", "builtin", IM_END, CHATML, IM_END[0]),
    ours("qwen3", "tekken", IM_END, CHATML, IM_END[0]),
    ours("qwen3_5", "gemma", IM_END, CHATML, IM_END[0]),
    ours("mistral_v3", "mistral_v3", STOP),
    ours("mistral_v7", "mistral_v7", STOP),
    ours("mistral_v7", "tekken", STOP, CHATML),
    ours("gemma2", "gemma", TURN_END, GEMMA),
    ours("gemma3", "gemma", TURN_END, GEMMA),
    ours("phi3", "phi3", ("<|end|>",)),
    ours("glm4", "builtin", GLM_ENDS, GLM, GLM[-1]),
    ours("deepseek_v3", "builtin", SENTENCE, DEEPSEEK, SENTENCE[0]),
    ours("cohere2", "builtin", COHERE_END, COHERE, COHERE_END[0]),
    ours("gpt_oss", "builtin", HARMONY_ENDS, HARMONY, "<|return|>"),
    ours("zephyr", "zephyr", STOP),
    ours("zephyr", "llama2", STOP),
    ours("zephyr", "mistral_v1", STOP),
    ours("plain", "llama2", STOP),
    ours("plain", "builtin", ("<|eos|>",)),
    ours("r1", "builtin", SENTENCE, DEEPSEEK, SENTENCE[0]),
    ours("parts", "builtin", UTTERANCE_END, UTTERANCE, UTTERANCE_END[0]),
    # with the packages of `make field`
    ours("qwq", "qwen", IM_END),
    ours("llama4", "llama4", ("<|eot|>",), LLAMA4 + HARMONY),
    ours("glm4", "smollm2", GLM_ENDS, GLM, GLM[-1]),
]
QWENS = "2_5 2_5_vl 3 3_instruct_2507 3_vl 3_5_think 3_5_nothink 3_6 3_8"
TRL_FAMILIES = [
    *trl(" ".join(f"qwen{version}" for version in QWENS.split()), "qwen", IM_END),
    *trl("llama3 llama3_1 llama3_2", "llama3", EOT),
    *trl("gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5", "gemma", GEMMA4_ENDS, GEMMA4),
    *trl("diffusion_gemma", "gemma", GEMMA4_ENDS, GEMMA4),
    *trl("gemma gemma3", "gemma", TURN_END, GEMMA),
    *trl("nemotron_3_nano nemotron_3_super nemotron_3_ultra nemotron_3_5_lightning", "tekken",
         IM_END, CHATML, IM_END[0]),
    *trl("lfm2 lfm2_v2 lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl", "smollm2", IM_END, LFM2),
    *trl("cohere cohere2", "smollm2", COHERE_END, COHERE, COHERE_END[0]),
    *trl("deepseekv3 deepseek_r1_distill", "smollm2", SENTENCE, DEEPSEEK, SENTENCE[0]),
    *trl("smolvlm idefics3", "smollm2", UTTERANCE_END, UTTERANCE, UTTERANCE_END[0]),
    *trl("phi3 phi3_5", "phi3", ("<|end|>",)),
    *trl("glm4moe", "smollm2", GLM_ENDS, GLM, GLM[-1]),
    *trl("gptoss", "llama4", HARMONY_ENDS, LLAMA4 + HARMONY, "<|return|>"),
    *trl("muse_glimmer", "smollm2", ("<|eot|>",), MUSE, "<|eot|>"),
    *trl("llava_next", "mistral_v1", STOP),
]  # fmt: skip
