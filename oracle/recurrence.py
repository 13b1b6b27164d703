"""A recurrent layer token by token, in float64. It knows of no transitions, pieces or slots: only of tokens, each with
what it was computed after, and of orders in which a state goes through them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F

Kind = Literal["delta", "kda", "mamba"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """heads: of states.  groups: of keys, or of B and C.  v, k: the dimensions of a state, [v, k] for each head."""

    kind: Kind
    heads: int
    groups: int
    v: int
    k: int
    width: int = 3

    @property
    def dims(self) -> tuple[int, int, int]:
        """Of what the convolution gives: queries, keys and values; or x, B and C."""
        keys, values = self.groups * self.k, self.heads * self.v
        return (values, keys, keys) if self.kind == "mamba" else (keys, keys, values)


class Recurrence:
    """A random layer that remembers hundreds of tokens, and random inputs of tokens 1, 2, 3 ...; row 0 is zeros.

    inputs: [num_tokens + 1, dim], those of the convolution.  weight: [dim, width + 1], without a bias; SiLU behind it.
    decay, write: [num_tokens + 1, heads]: of the delta rule, the logarithm of a token's decay, and its strength. Of KDA
        a decay is for each of k, too.
    dt: [num_tokens + 1, heads], A, dt_bias, D: [heads]: of Mamba-2, before softplus.
    gates: [num_tokens + 1, heads, k], rates: [heads]: of KDA, what makes up its decays.
    All float64, with values that `dtype` can represent.
    """

    def __init__(self, shape: Shape, num_tokens: int, seed: int, dtype: torch.dtype = torch.float32):
        self.shape, dim = shape, sum(shape.dims)
        gen = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=gen).to(dtype).double()

        def uniform(low: float, high: float, *size: int) -> torch.Tensor:
            return torch.empty(*size).uniform_(low, high, generator=gen).double()

        self.inputs, self.weight = normal(num_tokens + 1, dim) + normal(dim) / 2, normal(dim, shape.width + 1)
        self.inputs = self.inputs.to(dtype).double()
        self.inputs[0] = 0
        rates = uniform(-7, -2, shape.heads).exp()
        self.decay = (-rates * uniform(0, 1.4, num_tokens + 1, shape.heads)).float().double()
        self.write = uniform(0, 1, num_tokens + 1, shape.heads).to(dtype).double()
        self.dt, self.A, self.dt_bias = (
            normal(num_tokens + 1, shape.heads),
            -rates.float().double(),
            normal(shape.heads),
        )
        self.D = normal(shape.heads)
        if shape.kind == "kda":
            self.gates, self.rates = normal(num_tokens + 1, shape.heads, shape.k), rates.float().double()
            self.decay = -self.rates[:, None] * F.softplus(self.gates)

    def convolved(self, contexts: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """What the convolution gives for each token, [num_tokens + 1, dim].  contexts: what each was computed after."""
        width = self.shape.width
        windows = torch.zeros(len(self.inputs), width + 1, dtype=torch.long)
        for token, seen in contexts.items():
            window = [*seen, token][-width - 1 :]
            windows[token, width + 1 - len(window) :] = torch.tensor(window)
        return F.silu((self.inputs[windows] * self.weight.T).sum(1))

    def last_inputs(self, tokens: Sequence[int]) -> torch.Tensor:
        """The convolution's state after these tokens, [dim, width]."""
        last = [*[0] * self.shape.width, *tokens][-self.shape.width :]
        return self.inputs[last].T


class States:
    """States and outputs of a layer, for tokens computed after what `contexts` says."""

    def __init__(self, layer: Recurrence, contexts: Mapping[int, Sequence[int]]):
        self.layer, self.shape = layer, layer.shape
        first, second, third = layer.convolved(contexts).split(self.shape.dims, 1)
        if self.shape.kind != "mamba":
            self._read, self._key, self._value = self._keys(first), self._keys(second), self._values(third)
            self._read, self._key = (
                x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (self._read, self._key)
            )
            self._read = self._read * self.shape.k**-0.5
        else:
            self._value, self._key, self._read = self._values(first), self._keys(second), self._keys(third)
            self._steps = F.softplus(layer.dt + layer.dt_bias)

    def _keys(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, self.shape.k)).repeat_interleave(self.shape.heads // self.shape.groups, 1)

    def _values(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, self.shape.v))

    def after(self, tokens: Sequence[int], state: torch.Tensor | None = None) -> torch.Tensor:
        """The state after these tokens, from `state` or zero, [heads, v, k]."""
        if state is None:
            state = torch.zeros(self.shape.heads, self.shape.v, self.shape.k, dtype=torch.float64)
        for t in tokens:
            key, value = self._key[t][:, None], self._value[t][..., None]
            if self.shape.kind != "mamba":
                state = state * self.layer.decay[t].exp().view(self.shape.heads, 1, -1)
                error = value - (state * key).sum(-1, keepdim=True)
                state = state + self.layer.write[t][:, None, None] * error * key
            else:
                decay = (self._steps[t] * self.layer.A).exp()
                state = state * decay[:, None, None] + self._steps[t][:, None, None] * value * key
        return state

    def unchanged(self, state: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """What the tokens leave of a state, [heads, any, k], if their values are zero."""
        for t in tokens:
            if self.shape.kind != "mamba":
                state = state * self.layer.decay[t].exp().view(self.shape.heads, 1, -1)
                key = self._key[t][:, None]
                state = state - self.layer.write[t][:, None, None] * (state * key).sum(-1, keepdim=True) * key
            else:
                state = state * (self._steps[t] * self.layer.A).exp()[:, None, None]
        return state

    def outputs(self, before: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """The outputs of tokens behind others, [len(tokens), heads, v]."""
        state, out = self.after(before), []
        for t in tokens:
            state = self.after([t], state)
            out.append((state * self._read[t][:, None]).sum(-1))
            if self.shape.kind == "mamba":
                out[-1] = out[-1] + self.layer.D[:, None] * self._value[t]
        return torch.stack(out)
