"""A builder of ONNX graphs: nodes in their order, and each weight stored once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from bothways.core.errors import optional

with optional("export", "exporting a model"):
    import onnx
    from onnx import TensorProto, helper, numpy_helper

OPSET, IR_VERSION = 17, 8
"""The first opset with LayerNormalization, which runtimes since 2022 read."""
LOWEST = float(np.finfo(np.float32).min)
"""Bias for the score of a hidden key. Finite: a row of −∞ would give NaN."""
Input = str | float | tuple[int, ...]
"""A value by its name, or a constant: a float in fp32, an int or a vector of ints in int64."""


class GraphBuilder:
    """A graph that grows by one node with each call of `op`; values are referred to by name.

    Args:
        names: the name of each parameter, by `id`.

    Attributes:
        scope: the prefix of the names of new nodes, such as "layers.0.attention".
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._nodes: list[onnx.NodeProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[object, tuple[str, TensorProto]] = {}
        self.scope = ""

    def op(self, kind: str, *inputs: Input, **attributes: Any) -> str:
        """Append a node with one output; return the name of the output."""
        return self._append(kind, inputs, 1, **attributes)[0]

    def split(self, x: str, *sizes: int) -> list[str]:
        """Divide the last axis into slices of these sizes; return their names."""
        return self._append("Split", (x, sizes), len(sizes), axis=-1)

    def _append(
        self, kind: str, inputs: Sequence[Input], count: int, **attributes: Any
    ) -> list[str]:
        names = [value if isinstance(value, str) else self._constant(value) for value in inputs]
        name = f"{self.scope}/{kind}_{len(self._nodes)}"
        outputs = [name if count == 1 else f"{name}:{at}" for at in range(count)]
        self._nodes.append(helper.make_node(kind, names, outputs, name, **attributes))
        return outputs

    def output(self, name: str, value: str, *axes: str | int) -> None:
        """Make a value in fp32 an output of the graph; the names or the lengths of its axes."""
        self._nodes.append(helper.make_node("Identity", [value], [name], f"/{name}"))
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, axes))

    def weight(self, tensor: Tensor, *, transposed: bool = False) -> str:
        """Return the name of a parameter, or of its transpose."""
        name = self._names[id(tensor)] + (".T" if transposed else "")
        if name not in self._constants:
            array = tensor.detach().numpy()
            self._keep(name, name, array.T if transposed else array)
        return name

    def array(self, name: str, values: NDArray[Any]) -> str:
        """Return the name of a constant array; arrays of one name must be equal."""
        if name not in self._constants:
            self._keep(name, name, values)
        return name

    def _constant(self, value: float | tuple[int, ...]) -> str:
        array = np.array(value, np.float32 if isinstance(value, float) else np.int64)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._keep(key, f"constant_{len(self._constants)}", array)
        return self._constants[key][0]

    def _keep(self, key: object, name: str, array: NDArray[Any]) -> None:
        # np.ascontiguousarray would make a vector of a scalar.
        values = np.array(array, order="C")
        self._constants[key] = (name, numpy_helper.from_array(values, name))

    def slice(self, x: str, start: str | int, stop: str | int, axis: int) -> str:
        """Return the part `[start, stop)` of an axis; a value by name is a vector of one number."""
        bounds = [at if isinstance(at, str) else (at,) for at in (start, stop)]
        return self.op("Slice", x, *bounds, (axis,))

    def unsqueeze(self, x: str, *axes: int) -> str:
        """Insert axes of length 1."""
        return self.op("Unsqueeze", x, axes)

    def dense(self, x: str, layer: nn.Linear) -> str:
        """Apply a dense layer to the last axis."""
        x = self.op("MatMul", x, self.weight(layer.weight, transposed=True))
        return x if layer.bias is None else self.op("Add", x, self.weight(layer.bias))

    def norm(self, x: str, layer: nn.Module) -> str:
        """Apply a LayerNorm or RMSNorm; an `nn.Identity` changes nothing."""
        if isinstance(layer, nn.RMSNorm):
            squares = self.op("ReduceMean", self.op("Mul", x, x), axes=(-1,), keepdims=1)
            root = self.op("Sqrt", self.op("Add", squares, layer.eps or 0.0))
            return self.op("Mul", self.op("Div", x, root), self.weight(layer.weight))
        if not isinstance(layer, nn.LayerNorm):
            return x
        weights = [self.weight(value) for value in (layer.weight, layer.bias) if value is not None]
        return self.op("LayerNormalization", x, *weights, axis=-1, epsilon=layer.eps)

    def activate(self, name: str, x: str) -> str:
        """Apply an activation of `model.config.Activation`; GELU is spelled as runtimes fuse it."""
        match name:
            case "tanh" | "relu":
                return self.op(name.capitalize(), x)
            case "silu":
                return self.op("Mul", x, self.op("Sigmoid", x))
            # x / 2 · (1 + erf(x / √2)), in the order of nodes that runtimes recognise.
            case "gelu":
                inner = self.op("Erf", self.op("Div", x, 2**0.5))
                product = self.op("Mul", x, self.op("Add", inner, 1.0))
                return self.op("Mul", product, 0.5)
            # x / 2 · (1 + tanh(√(2 / π) · (x + 0.044715 x³))).
            case "gelu_tanh":
                cube = self.op("Mul", self.op("Mul", self.op("Mul", x, x), x), 0.044715)
                inner = self.op("Mul", self.op("Add", x, cube), (2 / np.pi) ** 0.5)
                product = self.op("Mul", x, self.op("Add", self.op("Tanh", inner), 1.0))
                return self.op("Mul", product, 0.5)
            case _:
                raise AssertionError(f"no activation {name}")

    def model(
        self,
        inputs: Mapping[str, Sequence[str]],
        metadata: Mapping[str, str],
        producer: tuple[str, str],
    ) -> onnx.ModelProto:
        """Return the model.

        Args:
            inputs: the names of the axes of each input, all in int64.
            metadata: notes for the user of the file.
            producer: a name and a version.
        """
        graph = helper.make_graph(
            self._nodes,
            "bothways",
            [helper.make_tensor_value_info(n, TensorProto.INT64, a) for n, a in inputs.items()],
            self._outputs,
            [tensor for _, tensor in self._constants.values()],
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name=producer[0],
            producer_version=producer[1],
        )
        helper.set_model_props(model, dict(metadata))
        return model
