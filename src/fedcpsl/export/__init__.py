"""Models out of a run: one device's personal model as a file, its predictions, and a model for a new device."""

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}  # of files, by format
