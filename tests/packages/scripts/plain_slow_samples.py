"""Plain PyTorch. Planted: reading a sample takes 1 ms."""

import time

import torch
from settings import NUM_STEPS
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 16 * NUM_STEPS

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((32,), index / len(self)), index % 2


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 2))
optimizer = torch.optim.Adam(model.parameters())
for inputs, targets in DataLoader(Slow(), batch_size=16, shuffle=True):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item()!r}")
