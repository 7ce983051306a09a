"""The script `plain.py` on two workers: python examples/port_plain.py. Five lines differ; a test counts them."""

import torch

import rayps


def train_fn(epochs: int = 3):
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    mine = torch.utils.data.DistributedSampler(data, rayps.world().size, rayps.world().rank, shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=mine)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rayps.wrap(model, optimizer)
    for epoch in range(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    rayps.run(train_fn, workers=2)
