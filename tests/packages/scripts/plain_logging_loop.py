"""Plain PyTorch. Planted: after each step the loop writes all weights as text."""

import json
import tempfile

import torch
from settings import NUM_STEPS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(16 * NUM_STEPS, 32), torch.randn(16 * NUM_STEPS, 1))
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with tempfile.TemporaryFile("w+") as log:
    for inputs, targets in DataLoader(data, batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        log.seek(0)
        json.dump([weights.tolist() for weights in model.parameters()], log)
print(f"loss {loss.item()!r}")
