"""Losses that plain PyTorch computes with more memory than they need."""

from torchfast.losses.causal_lm import causal_lm_loss
from torchfast.losses.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy

__all__ = ["LinearCrossEntropy", "causal_lm_loss", "linear_cross_entropy"]
