"""Goal 3's peer: the two-head network by a plain PyTorch loop: 32-bit floats, contiguous, eager, as torch is installed.

python plain_two_heads.py SETTINGS.json; imports nothing of paceline. The same images, network, recipe, batches and
number of steps; everything lies in memory, normalised. Prints JSON: seconds of the training with its validations,
accuracy on the test split, and test images predicted in a second.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss


class TwoHead(nn.Module):
    def __init__(self, size, num_classes, filters):
        super().__init__()
        wide = 2 * filters
        self.stem = nn.Sequential(nn.Conv2d(1, filters, 5, padding=2, bias=False), nn.BatchNorm2d(filters), nn.ReLU())
        self.branch = nn.Sequential(
            nn.Conv2d(filters, wide, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide),
        )
        self.skip = nn.Sequential(nn.Conv2d(filters, wide, 1, bias=False), nn.BatchNorm2d(wide))
        num_features = wide * ((size + 1) // 2) ** 2
        self.classify = nn.Linear(num_features, num_classes)
        self.regress = nn.Linear(num_features, 1)

    def forward(self, images_NCHW):
        stem = self.stem(images_NCHW)
        # A 1x1 convolution of stride 2: torch 2.13 crashes in its strided form on some CPUs.
        features = torch.relu(self.branch(stem) + self.skip(stem[:, :, ::2, ::2])).flatten(1)
        return self.classify(features), self.regress(features)


def train(network, splits, settings):
    """Train with a validation after each epoch; returns the number of steps."""
    images_NCHW, labels_N, angles_NT = splits["train"]
    optimizer = torch.optim.Adam(network.parameters(), settings["learning_rate"])
    steps = 0
    for _ in range(settings["num_epochs"]):
        network.train()
        for chosen in torch.randperm(len(labels_N)).split(settings["batch_size"]):
            optimizer.zero_grad()
            logits_NK, told_NT = network(images_NCHW[chosen])
            loss = cross_entropy(logits_NK, labels_N[chosen])
            loss = loss + settings["angle_weight"] * mse_loss(told_NT, angles_NT[chosen])
            loss.backward()
            optimizer.step()
            steps += 1
        predict(network, splits["validation"], settings["predict_batch_size"])
    return steps


@torch.no_grad()
def predict(network, split, batch_size):
    """Share of the classes that are told right."""
    network.eval()
    images_NCHW, labels_N, _ = split
    right = 0
    for images, labels in zip(images_NCHW.split(batch_size), labels_N.split(batch_size), strict=True):
        logits_NK, _ = network(images)
        right += int((logits_NK.softmax(1).argmax(1) == labels).sum())
    return right / len(labels_N)


def main(settings):
    torch.manual_seed(settings["seed"])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    data = np.load(settings["data"])
    mean, std = (torch.from_numpy(data[name]).float() for name in ("mean", "std"))

    def split(name):
        kinds = (data[f"{name}_{kind}"] for kind in ("images", "labels", "targets"))
        images_NHWC, labels_N, angles_NT = map(torch.from_numpy, kinds)
        return ((images_NHWC.float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous(), labels_N, angles_NT

    splits = {name: split(name) for name in ("train", "validation", "test")}
    network = TwoHead(splits["train"][0].shape[-1], int(splits["train"][1].max()) + 1, settings["width"])
    started = time.perf_counter()
    steps = train(network, splits, settings)
    seconds = time.perf_counter() - started
    accuracy = predict(network, splits["test"], settings["predict_batch_size"])
    started, passes = time.perf_counter(), 0
    while time.perf_counter() - started < settings["predict_seconds"]:
        predict(network, splits["test"], settings["predict_batch_size"])
        passes += 1
    rate = passes * len(splits["test"][1]) / (time.perf_counter() - started)
    print(json.dumps({"seconds": seconds, "num_steps": steps, "accuracy": accuracy, "samples_per_second": rate}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
