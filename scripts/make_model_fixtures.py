"""Makes small models with real Keras, for crates/data/tests/keras_files.rs.

    python -m venv keras && keras/bin/pip install keras jax h5py
    keras/bin/python scripts/make_model_fixtures.py

Three models of the same layers in each of Keras' formats with the means that numpy gives, and
files of h5py in forms that Keras does not write but others do.
"""

import os
import pathlib

os.environ["KERAS_BACKEND"] = "jax"

import h5py
import keras
import numpy

FOLDER = pathlib.Path(__file__).parent.parent / "crates/data/tests/fixtures/models"
FOLDER.mkdir(exist_ok=True)


def network(units=3):
    layers = [
        keras.layers.Input((4,), name="flowers"),
        keras.layers.Dense(units, activation="relu", name="hidden"),
        keras.layers.BatchNormalization(name="normed"),
        keras.layers.Dense(2, name="scores"),
    ]
    return keras.Sequential(layers, name="small")


def trained(seed, units=3):
    keras.utils.set_random_seed(seed)
    model = network(units)
    model.compile(optimizer="sgd", loss=keras.losses.MeanSquaredError())
    rows = numpy.random.default_rng(seed).normal(size=(32, 4)).astype("float32")
    model.fit(rows, rows[:, :2], epochs=seed, batch_size=8, verbose=0)
    return model


models = [trained(seed) for seed in (1, 2, 3)]
for model, name in zip(models, "abc"):
    model.save(FOLDER / f"{name}.h5")
    model.save(FOLDER / f"{name}.keras")
    model.save_weights(FOLDER / f"{name}.weights.h5")
    numpy.savez(FOLDER / f"{name}.npz", **{v.path: v.numpy() for v in model.weights})
trained(4, units=5).save(FOLDER / "other.h5")

# The means with the weights 3, 1 and 1, and what a model with those answers.
mean = network()
mean.set_weights(
    [
        (3 * a.astype("float64") + b + c).astype("float64") / 5
        for a, b, c in zip(*(model.get_weights() for model in models))
    ]
)
question = numpy.array([[0.5, -1.0, 0.25, 2.0]], dtype="float32")
numpy.savez(
    FOLDER / "mean.npz",
    question=question,
    answer=mean.predict(question, verbose=0),
    **{v.path: v.numpy() for v in mean.weights},
)

numbers = numpy.arange(12, dtype="float32").reshape(3, 4)
with h5py.File(FOLDER / "forms.h5", "w") as file:
    file.attrs["model_config"] = numpy.bytes_(b'{"fixed": true}')
    group = file.create_group("group")
    group.create_dataset("packed", data=numbers, chunks=(2, 3), compression="gzip", shuffle=True)
    group.create_dataset("chunked", data=numbers, chunks=(2, 3))
    group.create_dataset("big", data=numbers.astype(">f4"))
    group.create_dataset("double", data=numbers.astype("float64"))
    group.create_dataset("half", data=numbers.astype("float16"))
    group.create_dataset("truth", data=numpy.array([True, False]))
    group.create_dataset("scalar", data=numpy.int64(-5))
    group.create_dataset("empty", data=numpy.zeros((0, 5), "float32"))
    brain = group.create_dataset("brain", data=numpy.array([0x3FC0, 0xC000], "uint16"))
    brain.attrs["dtype"] = "bfloat16"
with h5py.File(FOLDER / "newest.h5", "w", libver="latest") as file:
    file.create_dataset("deep/below/numbers", data=numbers)
with h5py.File(FOLDER / "texts.h5", "w") as file:
    file.create_dataset("words", data=["good", "bad"])
with h5py.File(FOLDER / "loop.h5", "w") as file:
    file["itself"] = file["/"]
with h5py.File(FOLDER / "promises.h5", "w") as file:
    file.create_dataset("huge", shape=(1 << 40,), dtype="float32")
with h5py.File(FOLDER / "bomb.h5", "w") as file:
    zeros = numpy.zeros(8 << 20, "float32")
    file.create_dataset("zeros", data=zeros, chunks=(1 << 20,), compression="gzip")

numpy.savez(
    FOLDER / "forms.npz",
    column=numpy.asfortranarray(numbers),
    big=numbers.astype(">f8"),
    half=numbers.astype("float16"),
    truth=numpy.array([True, False]),
    scalar=numpy.int32(-5),
)
numpy.savez(FOLDER / "objects.npz", w=numpy.array([{"a": 1}], dtype=object))
