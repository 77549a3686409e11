#!/usr/bin/python3
"""Makes a small `.npz` in the form of Keras' imdb.npz, for crates/data/src/corpus/tests.rs.

    /usr/bin/python3 scripts/make_keras_fixture.py

Texts are lists of word numbers in arrays of objects, which numpy pickles; words come from a file
beside it, and are three apart from the numbers in the arrays. The words are made up.
"""

import json
import pathlib

import numpy

FOLDER = pathlib.Path(__file__).parent.parent / "crates/data/tests/fixtures/keras"
WORDS = {"the": 1, "film": 2, "wonderful": 3, "dreadful": 4, "don't": 5}
OFFSET, START, UNKNOWN = 3, 1, 2


def text(words):
    return [START] + [WORDS[word] + OFFSET if word in WORDS else UNKNOWN for word in words.split()]


def texts(lines):
    array = numpy.empty(len(lines), dtype=object)
    array[:] = [text(line) for line in lines]
    return array


FOLDER.mkdir(exist_ok=True)
(FOLDER / "imdb_word_index.json").write_text(json.dumps(WORDS))
numpy.savez(
    FOLDER / "imdb.npz",
    x_train=texts(["the wonderful film", "the dreadful film", "wonderful something", "don't"]),
    y_train=numpy.array([1, 0, 1, 0]),
    x_test=texts(["wonderful the film", "dreadful"]),
    y_test=numpy.array([1, 0]),
)
# The same with padding to a rectangle, as after pad_sequences.
numpy.savez_compressed(
    FOLDER / "padded.npz",
    x_train=numpy.array([[0, 1, 4, 6], [0, 0, 1, 7]], dtype=numpy.int32),
    y_train=numpy.array([1, 0], dtype=numpy.uint8),
    x_test=numpy.array([[1, 6, 4, 5]], dtype=numpy.int32),
    y_test=numpy.array([1], dtype=numpy.uint8),
)


class Hostile:
    def __reduce__(self):
        import os

        return (os.system, ("touch /tmp/skep-was-here",))


hostile = numpy.empty(1, dtype=object)
hostile[0] = Hostile()
numpy.savez(FOLDER / "hostile.npz", x_train=hostile, y_train=[1], x_test=hostile, y_test=[1])
