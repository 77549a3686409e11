"""ONNX files made by real PyTorch, and what onnxruntime says of them.

Called as `make.py MODEL.safetensors DIGITS FOLDER`. MODEL is a trained LeNet-5, DIGITS the bytes of
some digits of 28 x 28. Writes the files that `serve_onnx.rs` serves into FOLDER, and onnxruntime's
answers into FOLDER/expected.json. Nothing goes between torch and numpy here: the two need not be of
the same age.
"""

import json
import pathlib
import struct
import sys

import numpy
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.nn import functional


def load_file(path):
    """The F32 tensors of a safetensors file."""
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, info in header.items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in info["data_offsets"])
            flat = torch.frombuffer(bytearray(data[start:end]), dtype=torch.float32)
            tensors[name] = flat.reshape(info["shape"])
    return tensors


class LeNet5(nn.Module):
    """The network alone: pictures come in as it was trained on them."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, image):
        x = functional.max_pool2d(functional.relu(self.conv1(image)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(x.flatten(1)))
        return self.fc3(functional.relu(self.fc2(x)))


class OfBytes(nn.Module):
    """Normalises by itself: takes bytes from 0 to 255."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, image):
        return self.inner((image / 255 - 0.1307) / 0.3081)


class ChannelsLast(nn.Module):
    """Height, width, channels; probabilities; one picture at a time."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, picture):
        scores = self.inner((picture.permute(0, 3, 1, 2) - 0.1307) / 0.3081)
        return functional.softmax(scores, dim=1)


class TwoInputs(nn.Module):
    def forward(self, left, right):
        weighted = left * right.unsqueeze(1).to(left.dtype)
        return weighted.sum(1), right + 1


class Words(nn.Module):
    """The mean of word vectors: rows of numbers of any length."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.vectors = nn.Embedding(50, 8)
        self.fc = nn.Linear(8, 2)

    def forward(self, tokens):
        return self.fc(self.vectors(tokens).mean(1))


def export(module, inputs, path, names, outputs, free):
    module.eval()
    torch.onnx.export(
        module,
        inputs,
        str(path),
        input_names=names,
        output_names=outputs,
        dynamic_axes=free,
        opset_version=13,
    )


def main():
    parameters, digits, folder = sys.argv[1:]
    folder = pathlib.Path(folder)
    network = LeNet5()
    network.load_state_dict(load_file(parameters))
    picture = torch.zeros(1, 1, 28, 28)
    rows = {"image": {0: "n"}, "logits": {0: "n"}}
    export(network, picture, folder / "digits.onnx", ["image"], ["logits"], rows)
    export(OfBytes(network), picture, folder / "bytes.onnx", ["image"], ["logits"], rows)
    export(
        ChannelsLast(network),
        torch.zeros(1, 28, 28, 1),
        folder / "last.onnx",
        ["picture"],
        ["scores"],
        {},
    )
    export(
        TwoInputs(),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)),
        folder / "two.onnx",
        ["left", "right"],
        ["sums", "counts"],
        {"left": {0: "n"}, "right": {0: "n"}},
    )
    export(
        Words(),
        torch.zeros(1, 5, dtype=torch.int64),
        folder / "words.onnx",
        ["tokens"],
        ["logits"],
        {"tokens": {0: "n", 1: "t"}, "logits": {0: "n"}},
    )
    file = onnx.load(folder / "bytes.onnx")
    classes = ["nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    for key, value in {"skep.classes": json.dumps(classes), "skep.form": "ink"}.items():
        file.metadata_props.add(key=key, value=value)
    onnx.save(file, folder / "named.onnx")
    # An operator that nobody has.
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain="elsewhere")
    graph = helper.make_graph([node], "strange", [value[0]], [value[1]])
    imports = [helper.make_opsetid("", 13), helper.make_opsetid("elsewhere", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports), folder / "strange.onnx")

    bytes_ = numpy.frombuffer(pathlib.Path(digits).read_bytes(), dtype=numpy.uint8)
    images = bytes_.reshape(-1, 1, 28, 28).astype(numpy.float32)
    shares = images / 255
    normal = ((shares - 0.1307) / 0.3081).astype(numpy.float32)

    def ask(name, **inputs):
        session = onnxruntime.InferenceSession(folder / name)
        return [output.tolist() for output in session.run(None, inputs)]

    last = [ask("last.onnx", picture=row.reshape(1, 28, 28, 1))[0][0] for row in shares]
    expected = {
        "digits": ask("digits.onnx", image=normal)[0],
        "bytes": ask("named.onnx", image=images)[0],
        "last": last,
        "two": ask(
            "two.onnx",
            left=numpy.array([[1, 2, 3], [4, 5, 6]], numpy.float32),
            right=numpy.array([2, 2**53 + 1], numpy.int64),
        ),
        "words": [
            ask("words.onnx", tokens=numpy.array([[3, 1, 4]], numpy.int64))[0],
            ask("words.onnx", tokens=numpy.array([[3, 1, 4, 1], [5, 9, 2, 6]], numpy.int64))[0],
        ],
    }
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main()
