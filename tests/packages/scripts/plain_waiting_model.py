"""Plain PyTorch. Planted: the model waits 10 ms in each forward pass."""

import time

import torch
from settings import NUM_STEPS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Waiting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, inputs):
        time.sleep(0.01)
        return self.net(inputs)


torch.manual_seed(0)
data = TensorDataset(torch.randn(16 * NUM_STEPS, 32), torch.randn(16 * NUM_STEPS, 1))
model = Waiting()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for inputs, targets in DataLoader(data, batch_size=16, shuffle=True):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
print(f"loss {loss.item()!r}")
