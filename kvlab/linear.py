"""Linear: nn.Linear, laid out and split so that decoding on a CPU reads the weights as fast as memory gives them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """The same parameters, shapes and results as nn.Linear.

    A decode step multiplies one row by every weight, so it takes as long as the weights take to come from memory. Two
    things that BLAS does not do by itself:
    - the weight (out, in) is stored column by column, which BLAS streams about 1.5 times as fast for a single row;
    - few rows are multiplied in one thread only, and one core cannot use all of the memory's bandwidth: as a batch of
      equal parts of the output, one for each thread, all cores read at once.
    """

    few_rows = 64  # more rows keep all cores busy in one product
    least_outputs = 512  # below, starting the threads costs more than it saves

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__(in_features, out_features, bias)
        self.weight.data = self.weight.data.t().contiguous().t()

    def forward(self, x: Tensor) -> Tensor:
        rows, out = math.prod(x.shape[:-1]), self.out_features
        parts = self.parts(rows)
        if parts == 1:
            return F.linear(x, self.weight, self.bias)
        columns = self.weight.as_strided((parts, self.in_features, out // parts), (out // parts, out, 1))  # a view
        y = torch.bmm(x.reshape(1, rows, -1).expand(parts, -1, -1), columns)  # (parts, rows, out / parts)
        y = y.transpose(0, 1).reshape(*x.shape[:-1], out)
        return y if self.bias is None else y + self.bias

    def parts(self, rows: int) -> int:
        """Into how many products to split `rows` rows; 1 is nn.Linear's own way."""
        w = self.weight
        if w.device.type != "cpu" or rows > self.few_rows or self.out_features < self.least_outputs:
            return 1
        if w.dtype not in (torch.float32, torch.float64) or w.stride() != (1, self.out_features):
            return 1
        return math.gcd(torch.get_num_threads(), self.out_features)
