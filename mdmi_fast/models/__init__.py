"""Masked models behind one small interface."""

from mdmi_fast.models.base import MaskedModel, MaskedOutput, PaddedModel, PermittingModel, RestrictedModel
from mdmi_fast.models.loading import load_model

__all__ = ["MaskedModel", "MaskedOutput", "PaddedModel", "PermittingModel", "RestrictedModel", "load_model"]
