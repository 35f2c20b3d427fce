"""Model folders in both directions: Hugging Face's files, our own format, the Hub, conversions."""

from typing import Literal

Format = Literal["onnx", "openvino"]
"""Formats of an exported graph, each in the folder of its name."""
GraphRuntime = Literal["onnxruntime", "openvino"]
"""The runtime of each format."""
