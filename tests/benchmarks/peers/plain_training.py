"""The training of goal 11 as a careful user of plain PyTorch writes it; imports nothing of paceline.

The same files, network, recipe, batches and steps. Images are decoded once into memory, for they fit; each sample is
augmented on the CPU by a DataLoader worker that stays. One device with all threads; channels last, a fused optimizer,
autocast for bf16. Metrics go to a JSON file.
"""

import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

SHIFT = 4
NUM_LOADERS = 1


def read_split(root):
    """Images (N, H, W, C) in uint8 and labels (N,)."""
    classes = sorted(path.name for path in root.iterdir())
    files = [(path, label) for label, name in enumerate(classes) for path in sorted((root / name).iterdir())]
    images = np.stack([np.asarray(Image.open(path).convert("RGB")) for path, _ in files])
    return images, torch.tensor([label for _, label in files])


class Images(Dataset):
    def __init__(self, images_NHWC, labels_N, mean, std, augment):
        self._labels_N = labels_N
        self._augment = augment
        normalised = (torch.from_numpy(images_NHWC).float() / 255 - mean) / std
        self._images_NCHW = normalised.permute(0, 3, 1, 2).contiguous()

    def __len__(self):
        return len(self._labels_N)

    def __getitem__(self, index):
        image_CHW = self._images_NCHW[index]
        if self._augment:
            top, left, flip = torch.randint(0, 2 * SHIFT + 1, (3,)).tolist()
            height, width = image_CHW.shape[1:]
            padded_CHW = nn.functional.pad(image_CHW, (SHIFT,) * 4)
            image_CHW = padded_CHW[:, top : top + height, left : left + width]
            if flip % 2:
                image_CHW = image_CHW.flip(2)
        return image_CHW, self._labels_N[index]


class ConvBlocks(nn.Module):
    def __init__(self, width, depth, num_classes=10):
        super().__init__()
        layers, channels = [], 3
        for index, filters in enumerate((width, 2 * width, 4 * width)):
            if index:
                layers.append(nn.MaxPool2d(2))
            for _ in range(depth):
                layers += [nn.Conv2d(channels, filters, 3, padding=1, bias=False), nn.BatchNorm2d(filters), nn.ReLU()]
                channels = filters
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classify = nn.Linear(channels, num_classes)

    def forward(self, images_NCHW):
        return self.classify(self.features(images_NCHW))


def read_splits(root):
    """The training and the test split, normalised alike."""
    (train_images, train_labels), (test_images, test_labels) = (read_split(root / split) for split in ("train", "test"))
    scaled = torch.from_numpy(train_images).float() / 255
    mean, std = scaled.mean((0, 1, 2)), scaled.std((0, 1, 2))
    training = Images(train_images, train_labels, mean, std, augment=True)
    return training, Images(test_images, test_labels, mean, std, augment=False)


def train(settings, wrap, sampler_of, tell):
    """Train, evaluate and log.

    Args:
        settings: root, out, batch_size, num_epochs, learning_rate, momentum, weight_decay, width, depth, bf16, seed.
        wrap: makes a network ready for a group of ranks.
        sampler_of: a sampler of the training split's samples.
        tell: takes metrics at the end of each epoch and of all.
    """
    torch.manual_seed(settings["seed"])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    training, testing = read_splits(Path(settings["root"]))
    sampler = sampler_of(training)
    batches = DataLoader(
        training, settings["batch_size"], sampler=sampler, num_workers=NUM_LOADERS, persistent_workers=True
    )
    network = wrap(ConvBlocks(settings["width"], settings["depth"]).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(
        network.parameters(),
        settings["learning_rate"],
        settings["momentum"],
        weight_decay=settings["weight_decay"],
        fused=True,
    )
    precision = torch.autocast("cpu", torch.bfloat16, enabled=settings["bf16"])
    steps, loss = 0, torch.zeros(())
    for epoch in range(settings["num_epochs"]):
        sampler.set_epoch(epoch)
        for images_NCHW, labels_N in batches:
            optimizer.zero_grad()
            with precision:
                logits_NK = network(images_NCHW.to(memory_format=torch.channels_last))
            loss = cross_entropy(logits_NK.float(), labels_N)
            loss.backward()
            optimizer.step()
            steps += 1
        tell({"epoch": epoch, "loss": loss.item()})
    metrics = {"accuracy": accuracy(network, testing, precision), "num_steps": steps}
    tell({"epoch": settings["num_epochs"], "loss": loss.item()} | metrics)
    Path(settings["out"]).write_text(json.dumps(metrics | {"logged_at": time.time()}))


def accuracy(network, testing, precision):
    network.eval()
    with torch.inference_mode(), precision:
        right = sum(
            int((network(images_NCHW.to(memory_format=torch.channels_last)).argmax(1) == labels_N).sum())
            for images_NCHW, labels_N in DataLoader(testing, 512)
        )
    return right / len(testing)
