"""Plain PyTorch. Nothing planted: convolutions take the time."""

import torch
from settings import NUM_STEPS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 32  # with 8, calling the operators takes longer than their work on a fast processor

torch.manual_seed(0)
data = TensorDataset(torch.randn(BATCH_SIZE * NUM_STEPS, 3, 24, 24), torch.randint(0, 10, (BATCH_SIZE * NUM_STEPS,)))
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for inputs, targets in DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, num_workers=1):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item()!r}")
