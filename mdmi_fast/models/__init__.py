"""Masked models behind one small interface."""

from mdmi_fast.models.base import MaskedModel, MaskedOutput
from mdmi_fast.models.loading import load_model

__all__ = ["MaskedModel", "MaskedOutput", "load_model"]
