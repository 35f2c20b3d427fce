"""A graph whose weights are stored in int8, with a scale for each output or row.

Dense layers get a `DequantizeLinear` before their `MatMul`: OpenVINO keeps such weights in int8 and
multiplies them by activations that it rounds in groups within a token. Rows of an embedding are
looked up in int8 and scaled afterwards. A matrix that is read in any other way stays as it is.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import optional

with optional("export", "exporting a model"):
    import onnx
    from onnx import TensorProto, helper, numpy_helper


def with_int8_weights(graph: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a graph with its matrices in int8, each stored once."""
    readers = defaultdict(list)
    for node in graph.graph.node:
        for position, name in enumerate(node.input):
            readers[name].append((node.op_type, position))
    matrices = {
        tensor.name: tensor
        for tensor in graph.graph.initializer
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2
    }
    dense = {name for name in matrices if set(readers[name]) == {("MatMul", 1)}}
    tables = {name for name in matrices if set(readers[name]) == {("Gather", 0)}}
    nodes, initializers, done = [], [], set[str]()
    for node in graph.graph.node:
        for name in (name for name in node.input if name in dense and name not in done):
            codes, scales = rounded(numpy_helper.to_array(matrices[name]), 0)
            zeros = numpy_helper.from_array(np.zeros(len(scales), np.int8), f"{name}.zero")
            tensors = [*_parts(name, codes, scales), zeros]
            initializers += tensors
            tensor_names = [part.name for part in tensors]
            nodes.append(
                helper.make_node("DequantizeLinear", tensor_names, [name], f"{name}.fp32", axis=1)
            )
            done.add(name)
        name = node.input[0] if node.input else ""
        if node.op_type == "Gather" and name in tables:
            if name not in done:
                codes, scales = rounded(numpy_helper.to_array(matrices[name]), 1)
                initializers += _parts(name, codes, scales[:, None])
                done.add(name)
            nodes += _looked_up(node)
        else:
            nodes.append(node)
    result = onnx.ModelProto()
    result.CopyFrom(graph)
    del result.graph.node[:], result.graph.initializer[:]
    result.graph.node.extend(nodes)
    unchanged = (each for each in graph.graph.initializer if each.name not in done)
    result.graph.initializer.extend([*unchanged, *initializers])
    return result


def rounded(values: NDArray[np.float32], axis: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return a matrix in int8, and the scales by which its slices along an axis are multiplied."""
    scales = np.abs(values).max(axis=axis, keepdims=True) / 127
    scales[scales == 0] = 1
    codes = np.clip(np.rint(values / scales), -127, 127).astype(np.int8)
    return codes, scales.squeeze(axis).astype(np.float32)


def _parts(
    name: str, codes: NDArray[np.int8], scales: NDArray[np.float32]
) -> list[onnx.TensorProto]:
    return [
        numpy_helper.from_array(codes, f"{name}.int8"),
        numpy_helper.from_array(scales, f"{name}.scale"),
    ]


def _looked_up(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return the nodes that look rows up in int8 and scale them."""
    table, index = node.input
    [out] = node.output
    return [
        helper.make_node("Gather", [f"{table}.int8", index], [f"{out}.int8"], f"{out}.int8"),
        helper.make_node("Gather", [f"{table}.scale", index], [f"{out}.scale"], f"{out}.scale"),
        helper.make_node(
            "Cast", [f"{out}.int8"], [f"{out}.cast"], f"{out}.cast", to=TensorProto.FLOAT
        ),
        helper.make_node("Mul", [f"{out}.cast", f"{out}.scale"], [out], f"{out}.scaled"),
    ]
