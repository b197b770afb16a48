"""Flags that truncate the sampled distribution, for scripts that do not train on its log-probs."""

from pydantic.dataclasses import dataclass

from common.config.flags import STRICT, Fraction, NotNegative, PositiveFraction


@dataclass(config=STRICT)
class TruncationArgs:
    """Truncated sampling"""

    top_p: PositiveFraction = 1.0
    """sample from the fewest tokens whose probabilities add up to this; 1: all tokens"""
    top_k: NotNegative[int] = 0
    """sample from this many most likely tokens; 0: all tokens"""
    min_p: Fraction = 0.0
    """sample from tokens with at least this fraction of the highest probability; 0: all tokens"""

    @property
    def truncation(self) -> dict[str, float] | None:
        """The flags by name, None if they keep the whole distribution."""
        flags = dict(top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)
        return None if flags == dict(top_p=1, top_k=0, min_p=0) else flags
