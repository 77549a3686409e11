"""Measures the result of own_model.py in plain PyTorch: the accuracy that the run had.

    python load_result.py skep-runs/runs/own-model/model.safetensors

Needs torch and safetensors; Skep does not have to be installed.
"""

import argparse
import sys

import torch
from safetensors.torch import load_file

import mnist
from cnn import CNN


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the model.safetensors of a run")
    parser.add_argument("--data", help="a folder with the four files of MNIST; see mnist.py")
    options = parser.parse_args()
    model = CNN()
    model.load_state_dict(load_file(options.model))
    model.eval()
    images, labels = mnist.load("test", options.data).tensors
    with torch.no_grad():
        right = int((model(images).argmax(dim=1) == labels).sum())
    print(f"test accuracy {100 * right / len(labels):.2f} % ({right} of {len(labels)})")


if __name__ == "__main__":
    try:
        main()
    except FileNotFoundError as error:
        sys.exit(f"error: {error}")
