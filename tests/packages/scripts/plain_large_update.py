"""Plain PyTorch. Planted: the optimizer updates a table of 4 million weights, and each batch uses some of them."""

import torch
from settings import NUM_STEPS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
tokens = torch.randint(0, 60_000, (8 * NUM_STEPS, 4))
data = TensorDataset(tokens, tokens.sum(dim=1) % 2)
model = nn.Sequential(nn.EmbeddingBag(60_000, 64), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for inputs, targets in DataLoader(data, batch_size=8):
    optimizer.zero_grad(set_to_none=False)
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
print(f"loss {loss.item()!r}")
