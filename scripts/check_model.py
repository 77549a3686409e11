"""What others say of the files that `skep model` writes; crates/skep/tests/model_tools.rs calls it.

    python scripts/check_model.py keras FILE MEAN.npz    Keras opens FILE and answers as MEAN does
    python scripts/check_model.py torch FILE TRUTH.npz   PyTorch loads weights only, to the bit
    python scripts/check_model.py hdf5 FILE TRUTH.npz    h5py reads the same, to the bit
    python scripts/check_model.py onnx FILE TRUTH.npz    onnx accepts it, onnxruntime answers the same
"""

import os
import sys

import numpy


def same(ours, theirs, name):
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        sys.exit(f"{name}: {ours.dtype} {ours.shape}, not {theirs.dtype} {theirs.shape}")
    if ours.tobytes() != theirs.tobytes():
        sys.exit(f"{name} differs")


def keras(path, truth):
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import keras

    model = keras.models.load_model(path)
    for variable in model.weights:
        # A model that was loaded has not always its own name before those of its layers.
        path = variable.path if variable.path in truth else f"{model.name}/{variable.path}"
        same(variable.numpy(), truth[path], path)
    answer = model.predict(truth["question"], verbose=0)
    print(f"{model.name} answers {answer.tolist()}, wanted {truth['answer'].tolist()}")
    if not numpy.array_equal(answer, truth["answer"]):
        sys.exit("it answers otherwise")


def torch(path, truth):
    import torch

    state = torch.load(path, weights_only=True)
    if sorted(state) != sorted(truth.files):
        sys.exit(f"it has {sorted(state)}, not {sorted(truth.files)}")
    for name, tensor in state.items():
        same(tensor.numpy(), truth[name], name)
    print(f"PyTorch {torch.__version__}: {len(state)} tensors")


def hdf5(path, truth):
    import h5py

    with h5py.File(path) as file:
        for name in truth.files:
            same(file[name][()], truth[name], name)
        print(f"h5py {h5py.__version__}: {len(truth.files)} datasets")


def onnx(path, truth):
    import onnx
    import onnxruntime

    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (port,) = session.get_inputs()
    (logits,) = session.run(["logits"], {port.name: truth["input"]})
    difference = float(numpy.abs(logits - truth["logits"]).max())
    agree = int((logits.argmax(1) == truth["logits"].argmax(1)).sum())
    print(f"{len(logits)} rows, largest difference {difference:.2e}, {agree} times the same answer")
    if difference > 1e-4 or agree != len(logits):
        sys.exit("onnxruntime answers otherwise")
    # Any number of rows, and a text of any length.
    (one,) = session.run(["logits"], {port.name: truth["input"][:1]})
    if numpy.abs(one - logits[:1]).max() > 1e-5:
        sys.exit("one row alone is answered otherwise")


if __name__ == "__main__":
    {"keras": keras, "torch": torch, "hdf5": hdf5, "onnx": onnx}[sys.argv[1]](
        sys.argv[2], numpy.load(sys.argv[3])
    )
