"""A training loop of one's own, from unitsphere's parts: MoCo v2 in forty lines."""

import sys

import torch

from unitsphere.common.randomness import generator
from unitsphere.data.loader import Loader
from unitsphere.data.source import open_images
from unitsphere.modules.backbones import build_backbone
from unitsphere.modules.encoder import Encoder
from unitsphere.modules.heads import projection_head
from unitsphere.modules.queue import KeyQueue
from unitsphere.modules.slow_copy import follow, slow_copy
from unitsphere.objectives import info_nce
from unitsphere.views.apply import apply
from unitsphere.views.draw import draw
from unitsphere.views.policies import POLICIES

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
loader = Loader(open_images("shapes=2000"))
policy = POLICIES["moco-v2-small"]
online = Encoder(build_backbone("resnet-tiny"), projection_head("mlp", 64, 64))
slow = slow_copy(online)
queue = KeyQueue(1024, 64)
optimizer = torch.optim.SGD(online.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)
batches = (torch.randperm(len(loader), generator=generator(0, "order", step))[:128] for step in range(steps))

for step, (_, canvas) in enumerate(loader.batches(batches)):
    tables = [draw(policy, len(canvas), generator(0, "views", step, view)) for view in range(2)]
    first, second = (apply(canvas, table, size=32, mean=[0.5] * 3, std=[0.25] * 3) for table in tables)
    query = online(first)
    with torch.no_grad():
        follow(slow, online, momentum=0.99)
        key = slow(second)
    loss = info_nce(query, key, queue.keys, temperature=0.2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    queue.push(key)
    if (step + 1) % 20 == 0:
        print(f"step {step + 1}: loss {loss.item():.3f}")
