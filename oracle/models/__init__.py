"""Tiny random-weight models of every served architecture, by name."""

from . import dense, experts, images, windows
from .spec import ModelSpec

_SPECS = [*dense.SPECS, *experts.SPECS, *windows.SPECS, *images.SPECS]
MODELS: dict[str, ModelSpec] = {spec.name: spec for spec in _SPECS}
