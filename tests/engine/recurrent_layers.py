"""Random layers with a running state for the kernels in C, and what they compute by definition."""

from array import array
from ctypes import addressof, byref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from truedraft.engine.memory.pointers import address
from truedraft.engine.native.library import Convolution, Recurrence, Spans, load_library

SHORT_CONV, DELTA_RULE, MAMBA2 = range(3)
CHUNK, ROLLBACK, NUM_RECORDS = 16, 32, 48
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    rule: int
    heads: int = 0
    key_heads: int = 0
    rows: int = 0
    columns: int = 0
    width: int = 4
    tiled: bool = False
    channels: int = 0  # a short convolution has them
    norm_groups: int = 1  # 0: no norm

    @property
    def convolved(self) -> int:
        keys, values = self.key_heads * self.rows, self.heads * self.columns
        return self.channels if self.rule == SHORT_CONV else 2 * keys + values

    @property
    def inputs(self) -> int:
        if self.rule == SHORT_CONV:
            return 3 * self.channels
        values, scalars = self.heads * self.columns, self.heads
        return self.convolved + values + (2 * scalars if self.rule == DELTA_RULE else scalars)

    @property
    def outputs(self) -> int:
        return self.channels if self.rule == SHORT_CONV else self.heads * self.columns


@dataclass
class Text:
    """Has one sequence's ``inputs`` [tokens, inputs], of which the caches have some."""

    slot: int
    inputs: torch.Tensor
    stored: int = 0
    folded: int = 0


@dataclass
class Layer:
    """Has random weights and caches for ``num_slots`` sequences, full of NaN."""

    shape: Shape
    num_slots: int = 4
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape, slots = self.shape, self.num_slots
        generator = torch.Generator().manual_seed(5)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator)

        self.weight = randn(shape.convolved, shape.width) / shape.width**0.5
        self.bias = randn(shape.convolved) if shape.rule == MAMBA2 else None
        self.decay_rate = -torch.rand(shape.heads, generator=generator) * 2
        self.dt_bias, self.skip = randn(shape.heads), randn(shape.heads)
        inner = shape.columns if shape.rule == DELTA_RULE else shape.heads * shape.columns
        self.norm = 1 + randn(inner) / 10 if shape.norm_groups else None

        def unknown(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((slots, *size), torch.nan, dtype=dtype)

        self.inputs = unknown(CHUNK + ROLLBACK + shape.width - 1, shape.convolved)
        self.state = unknown(shape.heads, shape.rows, shape.columns)
        self.keys = unknown(NUM_RECORDS, shape.key_heads * shape.rows)
        self.values = unknown(NUM_RECORDS, shape.heads * shape.columns)
        self.decays = unknown(NUM_RECORDS, shape.heads, dtype=torch.float64)
        self.library = load_library()
        turned = self.weight.T.contiguous()
        self.convolution = Convolution(
            channels=shape.convolved,
            width=shape.width,
            silu=shape.rule != SHORT_CONV,
            weight=self._at(turned),
            bias=None if self.bias is None else self._at(self.bias),
            num_inputs=self.inputs.shape[1],
            inputs=self._at(self.inputs),
        )
        self.struct = Recurrence(
            rule=shape.rule,
            convolution=addressof(self.convolution),
            heads=shape.heads,
            key_heads=shape.key_heads,
            rows=shape.rows,
            columns=shape.columns,
            tiled=shape.tiled,
            decay_rate=self._at(self.decay_rate),
            dt_bias=self._at(self.dt_bias),
            skip=self._at(self.skip),
            least_dt=0.01,
            most_dt=2.0,
            norm=None if self.norm is None else self._at(self.norm),
            norm_groups=shape.norm_groups,
            norm_eps=EPS,
            num_records=NUM_RECORDS,
            state=self._at(self.state),
            keys=self._at(self.keys),
            values=self._at(self.values),
            decays=self._at(self.decays),
        )
        assert self.library.recurrence_inputs(byref(self.struct)) == shape.inputs

    def _at(self, tensor: torch.Tensor) -> int:
        self.kept.append(tensor)
        return address(tensor, tensor.dtype, tuple(tensor.shape))

    def run(self, news: list[tuple[Text, int, int]]) -> list[torch.Tensor]:
        """Runs a pass over some texts: each brings so many tokens, of which so many may be taken back.
        Returns what comes out for each; texts count what is stored and folded then."""
        counts = [count for _, count, _ in news]
        x = torch.cat([text.inputs[text.stored : text.stored + count] for text, count, _ in news])
        first, total = [0], 0
        for count in counts:
            first.append(total := total + count)
        certain = [text.stored + count - uncertain for text, count, uncertain in news]
        columns = [
            first,
            [text.stored for text, _, _ in news],
            [text.slot for text, _, _ in news],
            [text.folded for text, _, _ in news],
            certain,
        ]
        numbers = [array("q", column) for column in columns]
        at = [address(each, torch.int64, (len(each),)) for each in numbers]
        spans = Spans(
            num_spans=len(news),
            num_tokens=total,
            first_token=at[0],
            num_stored=at[1],
            state_slot=at[2],
            num_folded=at[3],
            num_certain=at[4],
        )
        out = torch.full((total, self.shape.outputs), torch.nan)
        scratch = torch.full((self.library.recurrence_scratch(byref(self.struct), total),), torch.nan)
        places = (address(each, torch.float32, tuple(each.shape)) for each in (x, out, scratch))
        self.library.recur(byref(spans), byref(self.struct), *places)
        for (text, count, _), sure in zip(news, certain, strict=True):
            text.stored += count
            text.folded = max(text.folded, (sure - 1) // CHUNK * CHUNK, 0)
        return list(out.split(counts))

    def memory(self, text: Text) -> list[torch.Tensor]:
        """Returns all that later passes may read of a text: its state, records and inputs."""
        records = torch.arange(text.folded, text.stored) % NUM_RECORDS
        known = torch.arange(max(0, text.stored - self.shape.width + 1), text.stored)
        state = self.state[text.slot] if text.folded else torch.zeros(0)
        logs = (each[text.slot, records] for each in (self.keys, self.values, self.decays))
        return [state, *logs, self.inputs[text.slot, known % self.inputs.shape[1]]]

    def by_definition(self, inputs: torch.Tensor) -> torch.Tensor:
        """Computes all tokens of one text in float64, one after the other."""
        shape, x = self.shape, inputs.double()
        if shape.rule == SHORT_CONV:
            before, after, inner = x.chunk(3, 1)
            return after * self._convolved(before * inner)
        keys, values = shape.key_heads * shape.rows, shape.heads * shape.columns
        if shape.rule == DELTA_RULE:
            mixed, z, b, dt = x.split([2 * keys + values, values, shape.heads, shape.heads], 1)
            q, k, v = self._convolved(mixed).split([keys, keys, values], 1)
        else:
            z, mixed, dt = x.split([values, values + 2 * keys, shape.heads], 1)
            v, k, q = self._convolved(mixed).split([values, keys, keys], 1)
            b = dt
        q, k = (each.reshape(-1, shape.key_heads, shape.rows) for each in (q, k))
        v, z = (each.reshape(-1, shape.heads, shape.columns) for each in (v, z))
        shared = shape.heads // shape.key_heads
        owner = [h % shape.key_heads if shape.tiled else h // shared for h in range(shape.heads)]
        dt = F.softplus(dt + self.dt_bias.double())
        if shape.rule == DELTA_RULE:
            q, k = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (q, k))
            q = q * shape.rows**-0.5
        else:
            dt = dt.clamp(0.01, 2.0)
        decay = (self.decay_rate.double() * dt).exp()
        state = torch.zeros(shape.heads, shape.rows, shape.columns, dtype=torch.float64)
        out = torch.zeros_like(v)
        for t in range(len(x)):
            key, query = k[t, owner], q[t, owner]
            state = state * decay[t, :, None, None]
            if shape.rule == DELTA_RULE:
                added = b[t].sigmoid()[:, None] * (v[t] - torch.einsum("hij,hi->hj", state, key))
            else:
                added = dt[t, :, None] * v[t]
            state = state + key[:, :, None] * added[:, None]
            out[t] = torch.einsum("hij,hi->hj", state, query)
        if shape.rule == DELTA_RULE:
            assert self.norm is not None
            normed = out * (out.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.norm.double()
            return (normed * F.silu(z)).flatten(1)
        gated = ((out + self.skip.double()[:, None] * v) * F.silu(z)).flatten(1)
        if self.norm is None:
            return gated
        groups = gated.view(len(x), shape.norm_groups, -1)
        normed = groups * (groups.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return normed.flatten(1) * self.norm.double()

    def _convolved(self, x: torch.Tensor) -> torch.Tensor:
        window = torch.cat([x.new_zeros(self.shape.width - 1, x.shape[1]), x])
        taps = enumerate(self.weight.double().T)
        out = sum(weight * window[place : place + len(x)] for place, weight in taps)
        assert isinstance(out, torch.Tensor)
        out = out if self.bias is None else out + self.bias.double()
        return out if self.shape.rule == SHORT_CONV else F.silu(out)
