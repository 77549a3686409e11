"""A model behind Flask and onnxruntime, as people put it together: the peer of `skep serve`.

`make MODEL.safetensors FILE.onnx` writes a trained LeNet-5 as an ONNX file. With MODEL=FILE.onnx in
the environment, `serve PORT` is Flask's own server with threads, and `gunicorn flask_server:app`
the same behind gunicorn.
"""

import io
import json
import os
import pathlib
import struct
import sys

import numpy


def make(parameters: str, path: str) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    data = pathlib.Path(parameters).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensors = []
    for name, info in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in info["data_offsets"])
            values = numpy.frombuffer(data[start:end], "<f4").reshape(info["shape"])
            tensors.append(numpy_helper.from_array(values, name))
    for name, value in {"mean": 0.1307, "deviation": 0.3081}.items():
        tensors.append(numpy_helper.from_array(numpy.array(value, numpy.float32), name))
    nodes = [
        helper.make_node("Sub", ["image", "mean"], ["centred"]),
        helper.make_node("Div", ["centred", "deviation"], ["normal"]),
        helper.make_node(
            "Conv", ["normal", "conv1.weight", "conv1.bias"], ["a"], pads=[2, 2, 2, 2]
        ),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["c", "conv2.weight", "conv2.bias"], ["d"]),
        helper.make_node("Relu", ["d"], ["e"]),
        helper.make_node("MaxPool", ["e"], ["f"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["f"], ["g"]),
        helper.make_node("Gemm", ["g", "fc1.weight", "fc1.bias"], ["h"], transB=1),
        helper.make_node("Relu", ["h"], ["i"]),
        helper.make_node("Gemm", ["i", "fc2.weight", "fc2.bias"], ["j"], transB=1),
        helper.make_node("Relu", ["j"], ["k"]),
        helper.make_node("Gemm", ["k", "fc3.weight", "fc3.bias"], ["logits"], transB=1),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 1, 28, 28])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 10])
    graph = helper.make_graph(nodes, "lenet5", [image], [logits], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)


if os.environ.get("MODEL"):
    import onnxruntime
    from flask import Flask, jsonify, request
    from PIL import Image

    app = Flask(__name__)
    session = onnxruntime.InferenceSession(os.environ["MODEL"])

    @app.post("/v2/models/mnist/infer")
    def infer():
        tensor = request.get_json()["inputs"][0]
        image = numpy.array(tensor["data"], numpy.float32).reshape(tensor["shape"])
        rows = session.run(["logits"], {"image": image})[0]
        output = {
            "name": "logits",
            "datatype": "FP32",
            "shape": list(rows.shape),
            "data": rows.flatten().tolist(),
        }
        return jsonify(model_name="mnist", model_version="1", outputs=[output])

    @app.post("/predict")
    def predict():
        picture = Image.open(io.BytesIO(request.get_data())).convert("L").resize((28, 28))
        image = numpy.asarray(picture, numpy.float32).reshape(1, 1, 28, 28) / 255
        row = session.run(["logits"], {"image": image})[0][0]
        powers = numpy.exp(row - row.max())
        shares = powers / powers.sum()
        return jsonify(
            answer=str(int(shares.argmax())),
            probabilities={str(digit): float(share) for digit, share in enumerate(shares)},
        )


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(*sys.argv[2:])
    else:
        import logging

        # A line per request on the terminal would be measured too.
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        app.run("127.0.0.1", int(sys.argv[2]), threaded=True)
