"""Models as graphs for other runtimes: ONNX and OpenVINO, each in a folder that they read."""
